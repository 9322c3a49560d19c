// SPDX-License-Identifier: BSL-1.0
// A FileStore reads the input as a file of its folder: as it is, or after a header with a magic and a digest that are right.
#include <optional>
#include <string>

#include <sys/stat.h>
#include <gradsync/bootstrap/store/file_store.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("file_store", [](gradsync_fuzz::Input input) {
    const auto folder = gradsync_fuzz::directory() / "store";
    ::mkdir(folder.c_str(), 0700);
    const bool has_header = input.take<std::uint8_t>() % 2 == 1;
    const std::uint64_t surplus = has_header ? input.take<std::uint8_t>() / 64u : 0;  // of the length that the header says
    const std::string text(input.text());
    const struct {
        std::uint64_t magic = 0x31726f7473736467u, bytes, digest;
    } header{.bytes = text.size() + surplus, .digest = gradsync::detail::fnv1a(text.data(), text.size())};
    const std::string head = has_header ? std::string(reinterpret_cast<const char*>(&header), sizeof header) : std::string();
    gradsync_fuzz::write_file(folder / "name", {head, text});
    gradsync::FileStore store(folder.string());
    std::optional<gradsync::Blob> found;
    try {
        found = store.read("name");
    } catch (const gradsync::Error&) {
        gradsync_fuzz::check(!has_header || surplus != 0 || text.size() > gradsync::largest_blob, "a good file is refused");
        throw;
    }
    gradsync_fuzz::check(found.has_value() && (!has_header || gradsync::bootstrap::text_of(*found) == text),
                         "other bytes than were written");
});
