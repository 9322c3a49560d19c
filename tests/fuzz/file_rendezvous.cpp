// SPDX-License-Identifier: BSL-1.0
// Rank 1 of two meets in a folder whose files are the input: a file of rank 0's arrival, and one of its first exchange.
#include <sys/stat.h>

#include <gradsync/bootstrap/file_rendezvous.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("file_rendezvous", [](gradsync_fuzz::Input input) {
    const auto folder = gradsync_fuzz::directory() / "meeting";
    ::mkdir(folder.c_str(), 0700);
    const std::size_t arrival = input.take<std::uint8_t>();
    gradsync_fuzz::write_file(folder / "arrival.0", {input.take_bytes(arrival).text()});
    gradsync_fuzz::write_file(folder / "all_gather-0.0", {input.text()});
    gradsync::FileRendezvous meeting(folder.string(), 1, 2, {.timeout = std::chrono::milliseconds(1)});
    const auto all = meeting.all_gather({});
    gradsync_fuzz::check(all.size() == 2 && all[0].size() <= input.size() && all[1].empty(), "other bytes than were written");
});
