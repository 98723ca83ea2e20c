// folio.hpp without exceptions: FOLIO_THROW ends the program in the host's own way, here with success where the
// failure is the one that was provoked.
#include "expect.h"

#include <string>

#ifdef __cpp_exceptions
#error "this file is compiled with -fno-exceptions"
#endif

[[noreturn]] static void fatal(folio_status status, const std::string &message)
{
    EXPECT(status == FOLIO_ERR_SHAPE && message.find("[4]") != std::string::npos);
    std::exit(0);
}

#define FOLIO_THROW(status, message) fatal(status, message)
#include <folio/folio.hpp>

int main()
{
    const folio::Context context = folio::Context::cpu(0);
    EXPECT(context.get() != nullptr);
    static std::vector<float> floats(3);
    folio::Tensor tensor(floats, {4});
    return 1;
}
