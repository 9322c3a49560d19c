#pragma once
// A training run on disk: written whole or not at all, read back only if every byte is as it was written.
//
// Layout: magic (8 bytes) | version | steps | samples | text fingerprint | length of the model description (8 bytes
// each) | the description, padded to a multiple of 8 | for each parameter its value and the optimizer's two means |
// digest of all before.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "data.hpp"
#include "digest.hpp"
#include "optimizer.hpp"
#include "parameters.hpp"

namespace gradsync_train {

/// How far a run has come.
struct Progress {
    std::uint64_t steps = 0;
    std::uint64_t samples = 0;      // the number of the next sample: all the data order needs
    std::uint64_t fingerprint = 0;  // of the text
};

namespace checkpoint_detail {

constexpr std::array<char, 8> magic{'g', 'r', 'a', 'd', 's', 'y', 'n', 'c'};
constexpr std::uint64_t version = 1;

inline std::string padded(std::string text) {
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
}

/// Arrays are written in whole 8-byte words, so that the digest does not depend on how the bytes are cut into pieces.
inline std::size_t padded_bytes(std::size_t floats) { return (floats + 1) / 2 * 8; }

class Writer {
public:
    /// Writes nothing, but knows what the digest would be.
    Writer() : file_{nullptr, &std::fclose} {}
    explicit Writer(const std::filesystem::path& path)
        : path_{path}, file_{std::fopen(path.c_str(), "wb"), &std::fclose} {
        if (!file_) fail();
    }

    void bytes(const void* data, std::size_t n) {
        if (file_ && n > 0 && std::fwrite(data, n, 1, file_.get()) != 1) fail();
        digest_.update(data, n);
    }
    void word(std::uint64_t x) { bytes(&x, sizeof x); }
    void floats(const float* x, std::size_t n) {
        bytes(x, n / 2 * 8);
        if (n % 2 == 1) {
            const std::array<float, 2> last{x[n - 1], 0.0f};
            bytes(last.data(), 8);
        }
    }

    std::uint64_t digest() const { return digest_.value(); }
    void finish() {
        word(digest());
        if (std::fflush(file_.get()) != 0 || ::fsync(fileno(file_.get())) != 0) fail();
    }

private:
    [[noreturn]] void fail() const {
        throw std::system_error(errno, std::generic_category(), "cannot write " + path_.string());
    }

    std::filesystem::path path_;
    std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
    Digest digest_;
};

/// All but the digest at the end.
template <class Ops>
void write_state(Writer& out, const std::string& model, const Progress& progress, const Parameters<Ops>& parameters,
                 AdamW<Ops>& optimizer) {
    const std::string description = padded(model);
    out.bytes(magic.data(), magic.size());
    for (std::uint64_t x : {version, progress.steps, progress.samples, progress.fingerprint,
                            static_cast<std::uint64_t>(description.size())}) {
        out.word(x);
    }
    out.bytes(description.data(), description.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const std::size_t n = parameters[i].value.size();
        out.floats(parameters[i].value.data(), n);
        out.floats(optimizer.first()[i].data(), n);
        out.floats(optimizer.second()[i].data(), n);
    }
}

/// A directory for one at a time, be they threads, processes or, where the file system does it, machines; let go when
/// it is destroyed or its process dies. Whoever waits for too long, or cannot lock here at all, goes on without.
class Turn {
public:
    explicit Turn(const std::filesystem::path& directory) : folder_{::open(directory.c_str(), O_RDONLY | O_DIRECTORY)} {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (::flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK &&
               std::chrono::steady_clock::now() < deadline) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    }
    ~Turn() {
        if (folder_ >= 0) ::close(folder_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    int folder_;
};

}  // namespace checkpoint_detail

inline std::filesystem::path checkpoint_file(const std::filesystem::path& directory) {
    return directory / "checkpoint.gradsync";
}

/// Several ranks may be at it at a time, in a run that fails: each has a temporary file of its own.
template <class Ops>
void save_checkpoint(const std::filesystem::path& directory, int rank, const std::string& model,
                     const Progress& progress, const Parameters<Ops>& parameters, AdamW<Ops>& optimizer) {
    std::filesystem::create_directories(directory);
    const auto file = checkpoint_file(directory);
    const auto temporary = std::filesystem::path(file.string() + ".new" + std::to_string(rank));
    {
        checkpoint_detail::Writer out{temporary};
        checkpoint_detail::write_state(out, model, progress, parameters, optimizer);
        out.finish();
    }
    // Readers see the old file or the new one; syncing the directory makes the new name itself durable.
    std::filesystem::rename(temporary, file);
    if (const int folder = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY); folder >= 0) {
        ::fsync(folder);
        ::close(folder);
    }
}

/// For the ranks that are left of a run: each calls it, as nobody knows who else is left, and the first to come writes.
/// The others find the very bytes that they hold on disk, and leave it at that. So one file is written and not one a
/// rank, where all see one disk, and one on each machine where they do not. Returns whether this rank wrote.
template <class Ops>
bool keep_checkpoint(const std::filesystem::path& directory, int rank, const std::string& model,
                     const Progress& progress, const Parameters<Ops>& parameters, AdamW<Ops>& optimizer) {
    std::filesystem::create_directories(directory);
    checkpoint_detail::Writer own;
    checkpoint_detail::write_state(own, model, progress, parameters, optimizer);
    const checkpoint_detail::Turn turn{directory};
    std::ifstream in{checkpoint_file(directory), std::ios::binary | std::ios::ate};
    std::uint64_t kept = 0;
    // The renaming that made the file came after its last byte: the digest at its end stands for all of it.
    if (in && in.tellg() >= 8 && in.seekg(-8, std::ios::end) && in.read(reinterpret_cast<char*>(&kept), sizeof kept) &&
        kept == own.digest()) {
        return false;
    }
    save_checkpoint(directory, rank, model, progress, parameters, optimizer);
    return true;
}

/// A checkpoint's bytes, known to be complete. Read once and shared by the ranks of this process.
class Checkpoint {
public:
    explicit Checkpoint(const std::filesystem::path& directory) : file_{checkpoint_file(directory)} {
        std::ifstream in{file_, std::ios::binary};
        if (!in) throw UsageError("--resume: cannot read " + file_.string() + "; leave out --resume to begin anew");
        bytes_.assign(std::istreambuf_iterator<char>{in}, std::istreambuf_iterator<char>{});
        using checkpoint_detail::magic;
        if (bytes_.size() < magic.size() || std::memcmp(bytes_.data(), magic.data(), magic.size()) != 0) {
            refuse("is not a checkpoint of this program");
        }
        const std::size_t end = bytes_.size() - 8;  // where the digest stands
        const bool intact =
            bytes_.size() >= 56 && bytes_.size() % 8 == 0 && Digest{}.update(bytes_.data(), end).value() == word(end);
        if (bytes_.size() >= 16 && word(8) != checkpoint_detail::version) {
            refuse("has format version " + std::to_string(word(8)) + ", and this program reads version " +
                   std::to_string(checkpoint_detail::version));
        }
        if (!intact) refuse("is torn or damaged: its checksum does not match");
    }

    Progress progress() const { return {word(16), word(24), word(32)}; }

    /// Two checkpoints that differ have different ones.
    std::uint64_t digest() const { return word(bytes_.size() - 8); }

    /// Throws unless the checkpoint is of this very model.
    void expect_model(const std::string& model) const {
        const std::string description(bytes_.data() + 48, word(40));
        if (description != checkpoint_detail::padded(model)) {
            refuse("is of another model (" + description.substr(0, description.find_last_not_of(' ') + 1) + ", not " +
                   model + ")");
        }
    }

    template <class Ops>
    void restore(Parameters<Ops>& parameters, AdamW<Ops>& optimizer) const {
        std::size_t at = 48 + word(40), floats = 0;
        for (const auto& p : parameters) floats += 3 * checkpoint_detail::padded_bytes(p.value.size());
        if (at + floats + 8 != bytes_.size()) refuse("has another number of parameters");
        const auto read = [&](typename Ops::Floats& out) {
            std::memcpy(out.data(), bytes_.data() + at, out.size() * sizeof(float));
            at += checkpoint_detail::padded_bytes(out.size());
        };
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            read(parameters[i].value);
            read(optimizer.first()[i]);
            read(optimizer.second()[i]);
        }
        optimizer.set_steps(progress().steps);
    }

private:
    std::uint64_t word(std::size_t at) const {
        std::uint64_t x = 0;
        std::memcpy(&x, bytes_.data() + at, sizeof x);
        return x;
    }

    [[noreturn]] void refuse(const std::string& why) const {
        throw UsageError("--resume: " + file_.string() + " " + why + "; leave out --resume to begin anew");
    }

    std::filesystem::path file_;
    std::vector<char> bytes_;
};

}  // namespace gradsync_train
