// SPDX-License-Identifier: BSL-1.0
// An answer of etcd's gateway: the reader keeps no more than there was, and base64 that it takes is base64 of what it returns.
#include <gradsync/bootstrap/store/etcd_answer.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("etcd_answer", [](gradsync_fuzz::Input input) {
    const std::string text = input.text();
    if (const auto answer = gradsync::etcd::AnswerReader(text).read()) {
        std::size_t bytes = answer->token.size() + answer->error.size();
        for (const auto& entry : answer->entries) bytes += 1 + entry.key.size() + entry.value.size();
        gradsync_fuzz::check(bytes <= text.size(), "more than there was");
    }
    if (const auto bytes = gradsync::etcd::from_base64(text)) {
        const std::string again = gradsync::etcd::to_base64(*bytes);
        gradsync_fuzz::check(again.size() == text.size() && gradsync::etcd::from_base64(again) == bytes, "other base64");
    }
});
