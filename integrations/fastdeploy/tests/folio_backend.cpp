// folio_backend.h in an environment of its own: the library is found, missing, of another version, without the symbol.
//
//   folio_backend CASE [FOLDER] [LIBRARY]
//
// FOLDER holds the stub libraries. What is read once per process has a process for each case.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

// What surrounds the hunk of helper.h, which is compiled here as the patch leaves it, folio_backend.h included.
[[noreturn]] inline void pd_throw(const std::string &sentence) { throw std::logic_error("PaddleError: " + sentence); }
#define PD_THROW(sentence) pd_throw(sentence)
inline const char *getEnvVar(const char *varName) {
    return std::getenv(varName);
#include "helper_hunk.h"
    return backend && std::string(backend) == "DSA_ATTN"; /* as FastDeploy has it since March 2026 */
}

#define EXPECT(condition)                                                                    \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);      \
            std::exit(1);                                                                    \
        }                                                                                    \
    } while (0)

namespace {

using folio_backend::Environment;
using folio_backend::Library;

std::string folder;
std::string real_library;

bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

// What `action` throws, and "" where it throws nothing.
std::string thrown(const std::function<void()> &action)
{
    try {
        action();
    } catch (const std::exception &error) {
        return error.what();
    }
    return "";
}

void set(const char *name, const std::string &value) { EXPECT(setenv(name, value.c_str(), 1) == 0); }

// What `action` writes to stderr.
std::string written(const std::function<void()> &action)
{
    int ends[2];
    EXPECT(pipe(ends) == 0);
    std::fflush(stderr);
    const int before = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    action();
    std::fflush(stderr);
    dup2(before, STDERR_FILENO);
    close(ends[1]);
    char text[4096];
    const ssize_t count = read(ends[0], text, sizeof text);
    close(ends[0]);
    close(before);
    EXPECT(count >= 0);
    return std::string(text, static_cast<size_t>(count));
}

// The two questions, for every kind of name. R11: a wrong name is refused with all names that are known.
void names()
{
    auto asked = [](const char *backend, const char *prefer) { return folio_backend::requested({backend, prefer, ""}); };
    EXPECT(asked("", "").library == Library::Host && !asked("", "").latent_cache);
    EXPECT(asked("APPEND_ATTN", "1").library == Library::Host && !asked("APPEND_ATTN", "").latent_cache);
    EXPECT(asked("MLA_ATTN", "").library == Library::Host && asked("MLA_ATTN", "").latent_cache);
    EXPECT(asked("MLA_ATTN", "1").library == Library::FolioOrHost);
    EXPECT(asked("TRITON_MLA_ATTN", "1").library == Library::FolioOrHost && asked("TRITON_MLA_ATTN", "").latent_cache);
    EXPECT(asked("TRITON_MLA_ATTN", "0").library == Library::Host);
    EXPECT(asked("FOLIO_ATTN", "").library == Library::Folio && !asked("FOLIO_ATTN", "").latent_cache);
    EXPECT(asked("FOLIO_MLA_ATTN", "1").library == Library::Folio && asked("FOLIO_MLA_ATTN", "").latent_cache);
    EXPECT(asked("mla_attn", "1").library == Library::Host);
    EXPECT(asked("DECODE_UNIFIED_ATTN", "1").library == Library::FolioOrHost);
    EXPECT(asked("DECODE_UNIFIED_ATTN", "").library == Library::Host && !asked("DECODE_UNIFIED_ATTN", "1").latent_cache);

    // What the plugin leaves, and what somebody has changed since.
    auto answered = [](const char *backend, const char *by) { return folio_backend::requested({backend, "", "", by}); };
    EXPECT(answered("MLA_ATTN", "FOLIO_MLA_ATTN").library == Library::Folio);
    EXPECT(answered("APPEND_ATTN", "FOLIO_ATTN").library == Library::Folio);
    EXPECT(answered("APPEND_ATTN", "FOLIO_MLA_ATTN").library == Library::Host);
    EXPECT(answered("", "FOLIO_ATTN").library == Library::Host);
    EXPECT(answered("MLA_ATTN", "MLA_ATTN").library == Library::Host);
    const std::string refusal = thrown([&] { asked("FOLIO_MLA", ""); });
    EXPECT(contains(refusal, "FOLIO_MLA;"));
    for (const auto &backend : folio_backend::backends)
        EXPECT(contains(refusal, backend.name));
}

// Each way to fail names the path and what is wrong with it.
void stubs()
{
    auto failure = [](const char *name) { return folio_backend::open_library(folder + "/" + name).failure; };
    EXPECT(folio_backend::open_library(folder + "/libfolio.so.0").api->struct_size == sizeof(folio_api));
    EXPECT(contains(failure("absent.so"), folder + "/absent.so cannot be loaded"));
    EXPECT(contains(failure("no_symbol.so"), folder + "/no_symbol.so was loaded, but has no symbol folio_get_api"));
    EXPECT(contains(failure("refuses.so"), "is a Folio without ABI 0.1"));
    EXPECT(contains(failure("other_abi.so"), "answered with ABI 7.3; ABI 0.1 is needed"));
    EXPECT(contains(failure("short_table.so"), "has a table of 16 bytes"));

    // The first that fits is taken; where none does, every path is named.
    const auto second = folio_backend::resolve(std::vector<std::string>{folder + "/refuses.so", folder + "/libfolio.so.0"});
    EXPECT(second.api && second.failure.empty());
    const auto none = folio_backend::resolve(std::vector<std::string>{folder + "/absent.so", folder + "/no_symbol.so"});
    EXPECT(!none.api && contains(none.failure, "absent.so") && contains(none.failure, "no_symbol.so"));

    // Asked for by name, a failure is an error; preferred, it is a warning.
    const std::string error =
        thrown([] { folio_backend::resolve(Environment{"FOLIO_ATTN", "", folder + "/refuses.so"}); });
    EXPECT(contains(error, "FD_ATTENTION_BACKEND is FOLIO_ATTN") && contains(error, "refuses.so") &&
           contains(error, "FOLIO_LIBRARY"));
    const std::string warning = written(
        [] { EXPECT(!folio_backend::resolve(Environment{"MLA_ATTN", "1", folder + "/other_abi.so"})); });
    EXPECT(contains(warning, "MLA_ATTN stays with its own kernels") && contains(warning, "other_abi.so"));
    EXPECT(folio_backend::candidates(Environment{"", "", "/a/b.so"}, {"/c.so"}) == std::vector<std::string>{"/a/b.so"});
    EXPECT(folio_backend::candidates(Environment{}, {"/c.so"}) ==
           (std::vector<std::string>{"libfolio.so.0", "/c.so"}));
}

// Found by FOLIO_LIBRARY: the library itself, which then opens a context.
void found_by_path()
{
    set("FD_ATTENTION_BACKEND", "FOLIO_MLA_ATTN");
    set("FOLIO_LIBRARY", real_library);
    const folio_api *api = folio_backend::folio_library();
    EXPECT(api && useFolio() && checkAttentionBackend() && isFolioBackend());
    auto desc = FOLIO_INIT(folio_context_desc);
    desc.device_type = FOLIO_DEVICE_CPU;
    folio_context *context = nullptr;
    EXPECT(api->context_create(&desc, &context, nullptr) == FOLIO_OK);
    api->context_destroy(context);
}

// Found by the loader's path (LD_LIBRARY_PATH, set by CTest), once, however many threads ask first.
void found_by_loader()
{
    set("FD_ATTENTION_BACKEND", "FOLIO_ATTN");
    std::vector<std::thread> threads;
    std::array<const folio_api *, 8> answers{};
    for (auto &answer : answers)
        threads.emplace_back([&answer] { answer = folio_backend::folio_library(); });
    for (auto &thread : threads)
        thread.join();
    for (const auto *answer : answers)
        EXPECT(answer && answer == answers[0]);
    void *stub = dlopen("libfolio.so.0", RTLD_NOW | RTLD_NOLOAD);
    EXPECT(stub);
    auto calls = reinterpret_cast<int (*)()>(dlsym(stub, "stub_calls"));
    EXPECT(calls && calls() == 1);
    EXPECT(useFolio() && !checkAttentionBackend());
}

// Missing: an error of Paddle's type, at every call; and the first question is answered all the same.
void missing()
{
    set("FD_ATTENTION_BACKEND", "FOLIO_MLA_ATTN");
    set("FOLIO_LIBRARY", folder + "/absent.so");
    EXPECT(checkAttentionBackend());
    for (int call = 0; call < 2; call++) {
        const std::string error = thrown([] { useFolio(); });
        EXPECT(contains(error, "PaddleError: FD_ATTENTION_BACKEND is FOLIO_MLA_ATTN") && contains(error, "/absent.so"));
    }
}

// Missing, and only preferred: one warning, and FastDeploy's own kernels.
void preferred()
{
    set("FD_ATTENTION_BACKEND", "TRITON_MLA_ATTN");
    set("FD_FOLIO_PREFER", "1");
    set("FOLIO_LIBRARY", folder + "/absent.so");
    EXPECT(contains(written([] { EXPECT(!useFolio()); }), "/absent.so"));
    EXPECT(written([] { EXPECT(!useFolio()); }).empty());
    EXPECT(!isFolioBackend());
}

// Not asked for: nothing is opened, whatever FOLIO_LIBRARY says.
void not_asked()
{
    set("FD_ATTENTION_BACKEND", "MLA_ATTN");
    set("FOLIO_LIBRARY", folder + "/libfolio.so.0");
    EXPECT(!useFolio() && checkAttentionBackend() && !isFolioBackend());
    set("FD_ATTENTION_BACKEND", "DSA_ATTN");
    EXPECT(isLatentBackendOfFastDeploy()); /* read in every call, as before */
    EXPECT(!dlopen((folder + "/libfolio.so.0").c_str(), RTLD_NOW | RTLD_NOLOAD));
}

}  // namespace

int main(int argc, char **argv)
{
    const std::map<std::string, void (*)()> cases{
        {"names", names},         {"stubs", stubs},         {"found_by_path", found_by_path}, {"missing", missing},
        {"preferred", preferred}, {"not_asked", not_asked}, {"found_by_loader", found_by_loader},
    };
    EXPECT(argc == 4 && cases.count(argv[1]) == 1);
    unsetenv("FD_ATTENTION_BACKEND");
    unsetenv("FD_FOLIO_PREFER");
    unsetenv("FD_FOLIO_BACKEND");
    unsetenv("FOLIO_LIBRARY");
    folder = argv[2];
    real_library = argv[3];
    cases.at(argv[1])();
    return 0;
}
