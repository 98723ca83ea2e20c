// What folio_backend.h answers in this process's environment, in one line: latent or keys, and host, prefer or folio.
#include "folio_backend.h"

#include <cstdio>
#include <exception>

int main()
{
    try {
        const folio_backend::Backend asked = folio_backend::requested(folio_backend::Environment::read());
        const char *library = asked.library == folio_backend::Library::Host          ? "host"
                              : asked.library == folio_backend::Library::FolioOrHost ? "prefer"
                                                                                     : "folio";
        std::printf("%s %s %d\n", asked.latent_cache ? "latent" : "keys", library, folio_backend::asked_by_name());
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
    }
    return 0;
}
