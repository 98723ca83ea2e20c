// Queries in bf16 for a kernel that was compiled for fp16, as it is told of them: a bit of FolioAttentionParams::flags beside
// those of FolioRunFlag and query_type.h. src/cuda/params.rs has the same number. No code here.
#pragma once

enum FolioBf16QueryFlag { FOLIO_QUERIES_BF16 = 0x2000 };
