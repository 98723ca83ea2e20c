// Queries in fp8, as kernels are told of them: bits of FolioAttentionParams::flags beside FolioRunFlag. Without them the
// queries have the type that a kernel was compiled for. src/cuda/params.rs has the same numbers. No code here.
#pragma once

enum FolioQueryFlag { FOLIO_QUERIES_E4M3 = 0x100, FOLIO_QUERIES_E5M2 = 0x200 };
