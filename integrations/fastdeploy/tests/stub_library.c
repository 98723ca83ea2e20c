/* A library in Folio's place. What it gets wrong is chosen when it is compiled: STUB_NO_SYMBOL, STUB_REFUSES,
 * STUB_ABI (the version that it claims), STUB_SIZE (the size of the table that it claims). */
#include <folio/folio.h>

int stub_calls(void);
static int calls;

int stub_calls(void)
{
    return __atomic_load_n(&calls, __ATOMIC_SEQ_CST);
}

#ifndef STUB_NO_SYMBOL
#ifndef STUB_ABI
#define STUB_ABI FOLIO_ABI_VERSION
#endif
#ifndef STUB_SIZE
#define STUB_SIZE sizeof(folio_api)
#endif

const folio_api *folio_get_api(uint32_t abi_version)
{
    static folio_api api = {.struct_size = STUB_SIZE, .abi_version = STUB_ABI};
    __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
#ifdef STUB_REFUSES
    return abi_version == FOLIO_ABI_VERSION ? NULL : &api;
#else
    return abi_version == FOLIO_ABI_VERSION ? &api : NULL;
#endif
}
#endif
