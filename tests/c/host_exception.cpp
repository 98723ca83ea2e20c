// FOLIO_THROW as a host defines it: failures are then exceptions of the host's own type, and of no other. The type
// stands in for Paddle's, whose PD_THROW takes parts of a message, and whose eager mode ends the process when another
// exception passes through it.
#include "expect.h"

#include <sstream>
#include <string>

namespace host {

// Not even a std::exception.
struct Failure {
    std::string message;
};

} // namespace host

template <class... Parts>
[[noreturn]] void throw_of_host(const Parts &...parts)
{
    std::ostringstream message;
    (message << ... << parts);
    throw host::Failure{message.str()};
}

#define PD_THROW(...) throw_of_host(__VA_ARGS__)

#define FOLIO_THROW(status, message) PD_THROW("Folio: ", message)
#include <folio/folio.hpp>

namespace {

template <class Call>
void expect_failure(const char *part, Call call)
{
    try {
        call();
    } catch (const host::Failure &failure) {
        EXPECT(failure.message.rfind("Folio: ", 0) == 0 && failure.message.find(part) != std::string::npos);
        return;
    }
    EXPECT(!"it fails");
}

} // namespace

int main()
{
    // By the library, by the loader, and by the headers themselves.
    const folio::Context context = folio::Context::cpu(0);
    expect_failure("q_dtype", [&] { folio::Decode decode(context, FOLIO_INIT(folio_decode_desc)); });
    expect_failure("merge_state_args", [&] { context.merge(folio_merge_state_args{}); });
    expect_failure("/nonexistent", [] { folio::load("/nonexistent/libfolio.so.0"); });
    std::vector<float> floats(3);
    expect_failure("[4]", [&] { folio::Tensor tensor(floats, {4}); });
    auto info = FOLIO_INIT(folio_workspace_info);
    info.device_bytes = 1;
    expect_failure("device memory", [&] { folio::HostWorkspace workspace(info); });
    return 0;
}
