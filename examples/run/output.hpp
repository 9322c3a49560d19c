// SPDX-License-Identifier: BSL-1.0
#pragma once
// What ranks print: passed on in whole lines, each with its rank.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "processes.hpp"

namespace gradsync_run {

/// One stream of one rank.
class Stream {
public:
    /// Reads from `from`, and writes lines to `to` with `prefix` before each. `log`: gets the same without it, if it is there.
    Stream(Descriptor from, int to, std::string prefix, Descriptor log)
        : from_{std::move(from)}, to_{to}, prefix_{std::move(prefix)}, log_{std::move(log)} {}

    int descriptor() const { return from_.get(); }
    bool is_open() const { return static_cast<bool>(from_); }
    /// The last lines, oldest first.
    const std::deque<std::string>& last_lines() const { return last_; }

    /// Passes on what has arrived. Closes the stream at its end.
    void read() {
        char bytes[1 << 16];
        const ssize_t n = ::read(from_.get(), bytes, sizeof bytes);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) return close();
        const std::string_view text{bytes, static_cast<std::size_t>(n)};
        if (log_) write_all(log_.get(), text);
        pending_ += text;
        std::string lines;
        std::size_t begin = 0;
        for (std::size_t end; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1)
            add_line(std::string_view(pending_).substr(begin, end - begin), lines);
        pending_.erase(0, begin);
        if (pending_.size() > longest_line) add_line(std::exchange(pending_, {}), lines);
        write_all(to_, lines);
    }
    /// Passes on a last line without an end, and what is there already.
    void close() {
        if (!from_) return;
        from_ = {};
        std::string lines;
        if (!pending_.empty()) add_line(std::exchange(pending_, {}), lines);
        write_all(to_, lines);
    }

private:
    static constexpr std::size_t longest_line = std::size_t{1} << 20, kept_lines = 20;

    void add_line(std::string_view line, std::string& lines) {
        ((lines += prefix_) += line) += '\n';
        last_.emplace_back(line);
        if (last_.size() > kept_lines) last_.pop_front();
    }

    Descriptor from_;
    int to_;
    std::string prefix_;
    Descriptor log_;
    std::string pending_;
    std::deque<std::string> last_;
};

}  // namespace gradsync_run
