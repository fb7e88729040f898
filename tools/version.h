// What this program was built from.
#ifndef OFFLOAD_TOOLS_VERSION_H_
#define OFFLOAD_TOOLS_VERSION_H_

#include <string>
#include <string_view>

namespace offload::tools {

// "0123456789ab", with "-changed" behind it when files differed; "unknown" without git.
std::string_view built_commit();
// "PROGRAM 0.1.0 (COMMIT)"
std::string version_text(std::string_view program);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_VERSION_H_
