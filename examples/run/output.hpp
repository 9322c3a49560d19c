// SPDX-License-Identifier: BSL-1.0
#pragma once
// Passes on what ranks print, in whole lines, each with its rank. Nothing here waits for whoever reads the launcher's output, because signals
// must be heard meanwhile.

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "processes.hpp"

namespace gradsync_run {

/// Standard output or error of the launcher.
class Sink {
public:
    explicit Sink(int descriptor) : descriptor_{descriptor} {}

    int descriptor() const { return descriptor_; }
    void add(std::string_view text) {
        if (is_broken_) return;
        if (done_ > most_waiting) queue_.erase(0, std::exchange(done_, 0));  // a slow reader never lets it become empty
        queue_ += text;
    }
    bool has_something() const { return done_ < queue_.size(); }
    /// Ranks wait while nobody reads what they have printed.
    bool is_full() const { return queue_.size() - done_ > most_waiting; }

    /// Writes what can be written without waiting.
    void write() {
        while (has_something()) {
            pollfd ready{descriptor_, POLLOUT, 0};
            if (::poll(&ready, 1, 0) <= 0 || ready.revents == 0) return;
            // A pipe that is ready takes so much at least.
            const ssize_t n = ::write(descriptor_, queue_.data() + done_, std::min<std::size_t>(queue_.size() - done_, PIPE_BUF));
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
            if (n < 0) is_broken_ = true;  // nobody reads it any more
            done_ = n < 0 ? queue_.size() : done_ + static_cast<std::size_t>(n);
        }
        queue_.clear();
        done_ = 0;
    }

private:
    static constexpr std::size_t most_waiting = std::size_t{1} << 20;

    int descriptor_;
    std::string queue_;
    std::size_t done_ = 0;  // bytes of the queue that are written
    bool is_broken_ = false;
};

/// One stream of one rank.
class Stream {
public:
    /// Reads from `from`, and gives lines to `to` with `prefix` before each. `log`: gets the same without it, if it is there.
    Stream(Descriptor from, Sink& to, std::string prefix, Descriptor log)
        : from_{std::move(from)}, to_{&to}, prefix_{std::move(prefix)}, log_{std::move(log)} {}

    int descriptor() const { return from_.get(); }
    bool is_open() const { return static_cast<bool>(from_); }
    bool may_read() const { return is_open() && !to_->is_full(); }
    /// The last lines, oldest first.
    const std::deque<std::string>& last_lines() const { return last_; }

    /// Passes on what has arrived. Closes the stream at its end.
    void read() {
        char bytes[1 << 16];
        const ssize_t n = ::read(from_.get(), bytes, sizeof bytes);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) return close();
        const std::string_view text{bytes, static_cast<std::size_t>(n)};
        if (log_ && !write_all(log_.get(), text)) {
            to_->add("gradsync_run: cannot write a log: " + std::string(std::strerror(errno)) + "; it ends here\n");
            log_ = {};
        }
        pending_ += text;
        std::size_t begin = 0;
        for (std::size_t end; (end = pending_.find('\n', begin)) != std::string::npos; begin = end + 1)
            add_line(std::string_view(pending_).substr(begin, end - begin));
        pending_.erase(0, begin);
        if (pending_.size() > longest_line) add_line(std::exchange(pending_, {}));
    }
    /// A last line need not have an end.
    void close() {
        if (!from_) return;
        from_ = {};
        if (!pending_.empty()) add_line(std::exchange(pending_, {}));
    }

private:
    static constexpr std::size_t longest_line = std::size_t{1} << 20, kept_lines = 20;

    void add_line(std::string_view line) {
        to_->add(prefix_ + std::string(line) + "\n");
        last_.emplace_back(line);
        if (last_.size() > kept_lines) last_.pop_front();
    }

    Descriptor from_;
    Sink* to_;
    std::string prefix_;
    Descriptor log_;
    std::string pending_;
    std::deque<std::string> last_;
};

}  // namespace gradsync_run
