// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>

namespace gradsync_fuzz {

/// The bytes of one run, taken from the front.
class Input {
public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    std::size_t size() const noexcept { return size_; }
    const std::uint8_t* data() const noexcept { return data_; }

    Input take_bytes(std::size_t n) {
        const Input front(data_, std::min(n, size_));
        data_ += front.size_;
        size_ -= front.size_;
        return front;
    }
    /// A number; bytes that are missing are 0.
    template <class T>
    T take() {
        T number{};
        const Input bytes = take_bytes(sizeof number);
        if (bytes.size() != 0) std::memcpy(&number, bytes.data(), bytes.size());
        return number;
    }
    std::string text() const { return {reinterpret_cast<const char*>(data_), size_}; }

private:
    const std::uint8_t* data_;
    std::size_t size_;
};

/// What is run with inputs. Errors of the library, and other exceptions, are normal; a crash, a sanitizer's report or a failed `check` is not.
struct Target {
    Target(const char* its_name, void (*f)(Input)) : name(its_name), run(f), next(first) { first = this; }

    const char* name;
    void (*run)(Input);
    Target* next;
    static inline Target* first = nullptr;
};

inline void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::abort();
}

/// A directory for the files of a target, in memory where the system has that.
inline const std::filesystem::path& directory() {
    static const struct Directory {
        Directory() {
            std::string name = (std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path().string()) +
                               "/gradsync-fuzz-XXXXXX";
            if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
            path = name;
        }
        ~Directory() { std::filesystem::remove_all(path); }
        std::filesystem::path path;
    } own;
    return own.path;
}

/// Overwrites the file of an earlier run, whose memory it keeps.
inline void write_file(const std::filesystem::path& path, std::initializer_list<std::string> parts) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    off_t end = 0;
    bool written = file >= 0;
    for (const std::string& part : parts) {
        const auto bytes = static_cast<ssize_t>(part.size());
        written = written && ::pwrite(file, part.data(), part.size(), end) == bytes;
        end += bytes;
    }
    check(written && ::ftruncate(file, end) == 0 && ::close(file) == 0, "no file can be written");
}

template <class T>
std::string bytes_of(const T& x) {
    return {reinterpret_cast<const char*>(&x), sizeof x};
}

}  // namespace gradsync_fuzz
