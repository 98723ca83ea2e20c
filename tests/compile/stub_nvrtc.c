/* An NVRTC that compiles nothing: its cubins say which process made them, and from what.
 *
 * A source that holds "CRASH" ends the process, one that holds "WRONG" is refused with a log, and one that holds "MEET n"
 * waits until n processes have come so far, each of which leaves a file in the folder FOLIO_STUB_FOLDER. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, COMPILATION = 6 };

struct program {
    char *name, *source;
    int headers, options;
    char log[64], cubin[256];
};

EXPORT int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, OK; }
EXPORT const char *nvrtcGetErrorString(int code) { return code ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }

EXPORT int nvrtcCreateProgram(struct program **made, const char *source, const char *name, int headers,
                              const char *const *texts, const char *const *names) {
    struct program *program = calloc(1, sizeof *program);
    (void)texts, (void)names;
    program->name = strdup(name), program->source = strdup(source), program->headers = headers;
    return *made = program, OK;
}
EXPORT int nvrtcDestroyProgram(struct program **program) {
    free((*program)->name), free((*program)->source), free(*program);
    return *program = NULL, OK;
}

/* Processes that have come, this one among them. */
static int come(void) {
    const char *folder = getenv("FOLIO_STUB_FOLDER");
    char path[4096];
    int count = 0;
    snprintf(path, sizeof path, "%s/%d", folder, getpid());
    fclose(fopen(path, "w"));
    DIR *entries = opendir(folder);
    for (struct dirent *entry; (entry = readdir(entries));) count += entry->d_name[0] != '.';
    closedir(entries);
    return count;
}

EXPORT int nvrtcCompileProgram(struct program *program, int count, const char *const *options) {
    const char *meet = strstr(program->source, "MEET ");
    (void)options;
    if (strstr(program->source, "CRASH")) _exit(3);
    /* Ten seconds at most: then too few have come, and the test sees that. */
    for (int i = 0; meet && i < 1000 && come() < atoi(meet + 5); ++i) usleep(10000);
    if (strstr(program->source, "WRONG")) return strcpy(program->log, "stub: wrong"), COMPILATION;
    snprintf(program->cubin, sizeof program->cubin, "process %d, %s, %d headers, %d options", getpid(), program->name,
             program->headers, count);
    return OK;
}

static int answer(const char *text, char *to) { return strcpy(to, text), OK; }
EXPORT int nvrtcGetProgramLogSize(struct program *program, size_t *size) { return *size = strlen(program->log) + 1, OK; }
EXPORT int nvrtcGetProgramLog(struct program *program, char *log) { return answer(program->log, log); }
EXPORT int nvrtcGetCUBINSize(struct program *program, size_t *size) { return *size = strlen(program->cubin) + 1, OK; }
EXPORT int nvrtcGetCUBIN(struct program *program, char *cubin) { return answer(program->cubin, cubin); }
EXPORT int nvrtcGetPTXSize(struct program *program, size_t *size) { return *size = strlen(program->cubin) + 5, OK; }
EXPORT int nvrtcGetPTX(struct program *program, char *ptx) {
    return sprintf(ptx, "PTX %s", program->cubin), OK;
}
