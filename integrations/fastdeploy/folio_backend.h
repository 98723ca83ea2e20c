/**
 * @file folio_backend.h
 * Which attention backend the environment asks for, and Folio, loaded when one of its backends is asked for.
 *
 * FastDeploy's checkAttentionBackend() in custom_ops/gpu_ops/helper.h answers two questions at once. Here they are
 * apart: keeps_latent_cache() says whether the cache holds latent records of MLA, and folio_library() says which
 * library runs the attention. The header needs C++17 and folio.h. It needs neither FastDeploy nor Paddle, and nothing
 * of Folio is linked: a process that does not ask for Folio never opens it.
 *
 * Environment:
 *   FD_ATTENTION_BACKEND  FOLIO_ATTN or FOLIO_MLA_ATTN: Folio, or an error. Other names: not Folio.
 *   FD_FOLIO_BACKEND      FOLIO_ATTN or FOLIO_MLA_ATTN, set by Folio's plugin, which leaves FastDeploy's name for such
 *                         caches in FD_ATTENTION_BACKEND: Folio, as long as that name is still there.
 *   FD_FOLIO_PREFER       1: MLA_ATTN, TRITON_MLA_ATTN and DECODE_UNIFIED_ATTN run on Folio too where it can be loaded;
 *                         where not, a warning is written once.
 *   FOLIO_LIBRARY         path of libfolio.so; unset: libfolio.so.0 by the loader's search path.
 *
 * The variables are read once, at the first call. Every function may be called from any thread.
 */

#ifndef FOLIO_BACKEND_H
#define FOLIO_BACKEND_H

#include <dlfcn.h>
#include <folio/folio.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

/** How a failure leaves. A host that must see exceptions of its own type defines it first: PD_THROW(sentence). */
#ifndef FOLIO_BACKEND_THROW
#define FOLIO_BACKEND_THROW(sentence) throw std::runtime_error(sentence)
#endif

namespace folio_backend {

/** Whose library runs the attention. */
enum class Library {
    Host,          /**< FastDeploy's own kernels */
    FolioOrHost,   /**< Folio where it can be loaded */
    Folio,         /**< Folio, or an error */
};

/** What a name of FD_ATTENTION_BACKEND stands for. */
struct Backend {
    const char *name;
    bool latent_cache; /**< the cache holds latent records, and decoder tiles are those of MLA */
    Library library;
    bool preferable;  /**< FD_FOLIO_PREFER puts it on Folio */
    const char *host; /**< of Folio's: FastDeploy's name for such caches; NULL of FastDeploy's own */
};

/** Every name that FastDeploy knows, and Folio's. The plugin's selection.py says the same. */
inline constexpr std::array<Backend, 13> backends{{
    {"NATIVE_ATTN", false, Library::Host, false, nullptr},
    {"APPEND_ATTN", false, Library::Host, false, nullptr},
    {"MLA_ATTN", true, Library::Host, true, nullptr},
    {"DSA_ATTN", false, Library::Host, false, nullptr},
    {"FLASH_ATTN", false, Library::Host, false, nullptr},
    {"BLOCK_ATTN", false, Library::Host, false, nullptr},
    {"PLAS_ATTN", false, Library::Host, false, nullptr},
    {"HPU_ATTN", false, Library::Host, false, nullptr},
    {"FLASH_MASK_ATTN", false, Library::Host, false, nullptr},
    {"TRITON_MLA_ATTN", true, Library::Host, true, nullptr},
    {"DECODE_UNIFIED_ATTN", false, Library::Host, true, nullptr},
    {"FOLIO_ATTN", false, Library::Folio, false, "APPEND_ATTN"},
    {"FOLIO_MLA_ATTN", true, Library::Folio, false, "MLA_ATTN"},
}};

/** The backend of a name, or NULL. */
inline const Backend *find(const std::string &name)
{
    for (const Backend &backend : backends)
        if (name == backend.name)
            return &backend;
    return nullptr;
}

/** The variables that decide. An empty one counts as unset. */
struct Environment {
    std::string attention_backend; /**< FD_ATTENTION_BACKEND */
    std::string prefer;            /**< FD_FOLIO_PREFER */
    std::string library;           /**< FOLIO_LIBRARY */
    std::string folio_backend{};   /**< FD_FOLIO_BACKEND */

    static Environment read()
    {
        auto variable = [](const char *name) {
            const char *value = std::getenv(name);
            return std::string(value ? value : "");
        };
        return {variable("FD_ATTENTION_BACKEND"), variable("FD_FOLIO_PREFER"), variable("FOLIO_LIBRARY"),
                variable("FD_FOLIO_BACKEND")};
    }
};

/** Every name, for a sentence. */
inline std::string names()
{
    std::string list;
    for (const Backend &backend : backends)
        list += (list.empty() ? "" : ", ") + std::string(backend.name);
    return list;
}

/**
 * The backend that is asked for; unset: FastDeploy's default, APPEND_ATTN. A name that nobody knows is FastDeploy's to
 * refuse, unless it begins with FOLIO.
 */
inline Backend requested(const Environment &environment)
{
    // The plugin has answered. Where somebody has changed FastDeploy's name since, that decides.
    const Backend *answered = find(environment.folio_backend);
    if (answered && answered->host && environment.attention_backend == answered->host)
        return *answered;

    const std::string name = environment.attention_backend.empty() ? "APPEND_ATTN" : environment.attention_backend;
    if (const Backend *known = find(name)) {
        Backend asked = *known;
        if (asked.preferable && environment.prefer == "1")
            asked.library = Library::FolioOrHost;
        return asked;
    }
    if (name.rfind("FOLIO", 0) == 0)
        FOLIO_BACKEND_THROW("FD_ATTENTION_BACKEND is " + name + "; the names that are known are " + names());
    return {"", false, Library::Host, false, nullptr};
}

/** The table of Folio's functions, or why there is none. */
struct Resolution {
    const folio_api *api = nullptr;
    std::string failure; /**< one sentence for every path that was tried; empty with a table */
};

/** Opens one library and checks its table. It is never closed again: it may hold threads and modules of a GPU. */
inline Resolution open_library(const std::string &path)
{
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return {nullptr, path + " cannot be loaded: " + dlerror() + "."};
    auto get_api = reinterpret_cast<decltype(&folio_get_api)>(dlsym(library, "folio_get_api"));
    if (!get_api)
        return {nullptr, path + " was loaded, but has no symbol folio_get_api: it is not Folio."};

    const std::string wanted = std::to_string(FOLIO_ABI_MAJOR) + "." + std::to_string(FOLIO_ABI_MINOR);
    const folio_api *api = get_api(FOLIO_ABI_VERSION);
    if (!api)
        return {nullptr, path + " is a Folio without ABI " + wanted + ", for which this program was compiled."};
    if (api->abi_version != FOLIO_ABI_VERSION)
        return {nullptr, path + " answered with ABI " + std::to_string(api->abi_version >> 16) + "." +
                             std::to_string(api->abi_version & 0xffff) + "; ABI " + wanted + " is needed."};
    if (api->struct_size < sizeof(folio_api))
        return {nullptr, path + " has a table of " + std::to_string(api->struct_size) + " bytes; this program needs " +
                             std::to_string(sizeof(folio_api)) + ": the library is older than its header."};
    return {api, ""};
}

/** Tries paths in turn; the first that is a fitting Folio is taken. */
inline Resolution resolve(const std::vector<std::string> &paths)
{
    std::string failure;
    for (const std::string &path : paths) {
        const Resolution resolution = open_library(path);
        if (resolution.api)
            return resolution;
        failure += failure.empty() ? resolution.failure : " " + resolution.failure;
    }
    return {nullptr, failure};
}

/** FOLIO_LIBRARY and nothing else, or libfolio.so by its soname, or what the host says. */
inline std::vector<std::string> candidates(const Environment &environment, const std::vector<std::string> &otherwise = {})
{
    if (!environment.library.empty())
        return {environment.library};
    std::vector<std::string> paths{"libfolio.so." + std::to_string(FOLIO_ABI_MAJOR)};
    paths.insert(paths.end(), otherwise.begin(), otherwise.end());
    return paths;
}

/** Folio's table for what the environment asks for; NULL where FastDeploy's own kernels run. */
inline const folio_api *resolve(const Environment &environment)
{
    const Backend backend = requested(environment);
    if (backend.library == Library::Host)
        return nullptr;
    const Resolution resolution = resolve(candidates(environment));
    if (resolution.api)
        return resolution.api;
    const std::string advice = " Set FOLIO_LIBRARY to the path of libfolio.so.";
    if (backend.library == Library::Folio)
        FOLIO_BACKEND_THROW(std::string("FD_ATTENTION_BACKEND is ") + backend.name + ", but Folio cannot be used: " +
                            resolution.failure + advice);
    std::fprintf(stderr, "FD_FOLIO_PREFER is 1, but %s stays with its own kernels: %s%s\n", backend.name,
                 resolution.failure.c_str(), advice.c_str());
    return nullptr;
}

/** Whether the cache holds latent records of MLA, so that decoder tiles are those of MLA. The first question. */
inline bool keeps_latent_cache()
{
    static const bool answer = requested(Environment::read()).latent_cache;
    return answer;
}

/** Whether one of Folio's backends was asked for by name, so that no kernel of FastDeploy's attention runs. */
inline bool asked_by_name()
{
    static const bool answer = requested(Environment::read()).library == Library::Folio;
    return answer;
}

/**
 * The library that runs the attention: Folio's table, or NULL for FastDeploy's own kernels. The second question.
 * The library is loaded by the first call. Where that fails, every call says so again.
 */
inline const folio_api *folio_library()
{
    static const folio_api *const answer = resolve(Environment::read());
    return answer;
}

}  // namespace folio_backend

#endif  // FOLIO_BACKEND_H
