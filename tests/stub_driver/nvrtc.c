/* A compiler that compiles nothing: every program becomes an image that the stub driver loads. It knows
 * nothing of sources or options, so that what the backend does with kernels is tested where NVRTC is not. */
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static const char image[] = "\x7f" "ELF of nothing";

EXPORT int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
EXPORT const char *nvrtcGetErrorString(int code) { return code ? "no such error" : "NVRTC_SUCCESS"; }
EXPORT int nvrtcCreateProgram(void **program, const char *text, const char *name, int num_headers,
                              const char *const *headers, const char *const *names) {
    (void)text, (void)name, (void)num_headers, (void)headers, (void)names;
    return *program = (void *)image, 0;
}
EXPORT int nvrtcDestroyProgram(void **program) { return *program = NULL, 0; }
EXPORT int nvrtcCompileProgram(void *program, int num_options, const char *const *options) {
    (void)program, (void)num_options, (void)options;
    return 0;
}
EXPORT int nvrtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 1, 0; }
EXPORT int nvrtcGetProgramLog(void *program, char *log) { return (void)program, *log = 0, 0; }
EXPORT int nvrtcGetCUBINSize(void *program, size_t *size) { return (void)program, *size = sizeof image, 0; }
EXPORT int nvrtcGetCUBIN(void *program, char *cubin) { return (void)program, memcpy(cubin, image, sizeof image), 0; }
EXPORT int nvrtcGetPTXSize(void *program, size_t *size) { return (void)program, *size = 1, 0; }
EXPORT int nvrtcGetPTX(void *program, char *ptx) { return (void)program, *ptx = 0, 0; }
