/**
 * @file folio_error.hpp
 * How failures leave folio.hpp: as folio::Error, or by what the host defines FOLIO_THROW to be.
 *
 * Some hosts accept exceptions of their own type only: Paddle's eager mode ends the process when another one
 * passes through it. Others have no exceptions. Both define FOLIO_THROW before the first of Folio's C++ headers is
 * included, as a statement that takes a folio_status and a std::string and does not return:
 *
 *     // Paddle, and every custom operator that includes <paddle/extension.h>
 *     #define FOLIO_THROW(status, message) PD_THROW("Folio: ", message)
 *     // PyTorch
 *     #define FOLIO_THROW(status, message) TORCH_CHECK(false, "Folio: ", message)
 *     // -fno-exceptions
 *     #define FOLIO_THROW(status, message) my_fatal(folio_status_name(status), message.c_str())
 *
 * The definition has to be the same in all files of a program or library (C++'s one-definition rule), so it belongs
 * in a header of the host's that includes folio.hpp, and everybody includes that one. If the statement returns, the
 * process aborts: the callers have nothing to go on with.
 */

#ifndef FOLIO_FOLIO_ERROR_HPP
#define FOLIO_FOLIO_ERROR_HPP

#include <folio/folio.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#ifndef FOLIO_THROW
#ifndef __cpp_exceptions
#error "folio.hpp without exceptions needs FOLIO_THROW, a statement that does not return: see folio_error.hpp"
#endif
/** What a failure does. Hosts may define it before they include folio.hpp; folio_error.hpp says how. */
#define FOLIO_THROW(status, message) throw ::folio::Error(status, message)
#endif

namespace folio {

/** A call that failed: its status, and the library's sentence as what(). */
class Error : public std::runtime_error {
public:
    /** From a status and a sentence. */
    Error(folio_status status, const std::string &message) : std::runtime_error(message), status_(status) {}

    /** FOLIO_ERR_… */
    folio_status status() const noexcept { return status_; }

private:
    folio_status status_;
};

namespace detail {

/** Every failure of Folio's C++ headers passes through here. */
[[noreturn]] inline void fail([[maybe_unused]] folio_status status, [[maybe_unused]] const std::string &message)
{
    FOLIO_THROW(status, message);
    std::abort();
}

}  // namespace detail

}  // namespace folio

#endif  // FOLIO_FOLIO_ERROR_HPP
