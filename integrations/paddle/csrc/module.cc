// The Python module of all ops.
#include "ops.h"

PYBIND11_MODULE(PADDLE_EXTENSION_NAME, module)
{
    module.doc() = "FastDeploy's attention ops on Folio, in FastDeploy's positional signatures.";
    folio_paddle::bind_mla(module);
    folio_paddle::bind_step(module);
    folio_paddle::bind_append(module);
    folio_paddle::bind_decode(module);
    folio_paddle::bind_ragged(module);
}
