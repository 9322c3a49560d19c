// SPDX-License-Identifier: BSL-1.0
#pragma once
// A training run on disk: written whole or not at all, read back only if every byte is as it was written.
//
// Layout: magic (8 bytes) | version | steps | samples | text fingerprint | micro-batches of a step | samples of each | length of the model description
// (8 bytes each) | the description, padded to a multiple of 8 | for each parameter its arrays (see StatePlace), each padded
// likewise | digest of all before. All of it is written and read in pieces: nobody needs to hold the whole state.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "data.hpp"
#include "digest.hpp"
#include "file.hpp"
#include "parameters.hpp"
#include "synchroniser.hpp"

namespace gradsync_train {

/// How far a run has come.
struct Progress {
    std::uint64_t steps = 0;
    std::uint64_t samples = 0;        // the number of the next sample: all the data order needs
    std::uint64_t fingerprint = 0;    // of the text
    std::uint64_t micro_batches = 0;  // of a step, of all ranks: the bits depend on nothing else of how the work is dealt
    std::uint64_t micro_batch = 0;    // samples of each
};

namespace checkpoint_detail {

constexpr std::array<char, 8> magic{'g', 'r', 'a', 'd', 's', 'y', 'n', 'c'};
constexpr std::uint64_t version = 2;
constexpr std::size_t header_bytes = 64;                              // before the description
constexpr std::uint64_t most_micro_batches = std::uint64_t{1} << 24;  // more would take hours to plan

inline std::string padded(std::string text) {
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
}

/// Arrays take whole 8-byte words, so that the digest does not depend on how the bytes are cut into pieces.
inline std::size_t padded_bytes(std::size_t floats) { return (floats + 1) / 2 * 8; }

inline void update(Digest& digest, std::span<const float> array) {
    const std::size_t n = array.size();
    digest.update(array.data(), n / 2 * 8);
    if (n % 2 == 1) {
        const std::array<float, 2> last{array[n - 1], 0.0f};
        digest.update(last.data(), 8);
    }
}

/// Where in a checkpoint the arrays are.
class Layout {
public:
    Layout(std::size_t begin, const Parameters& parameters, std::size_t arrays) : end_{begin} {
        for (const auto& p : parameters) {
            begins_.push_back(end_);
            strides_.push_back(padded_bytes(p.count));
            end_ += arrays * strides_.back();
        }
    }
    std::size_t at(StatePlace place) const {
        return begins_[place.parameter] + place.array * strides_[place.parameter] + place.first * sizeof(float);
    }
    /// Of the digest.
    std::size_t end() const { return end_; }

private:
    std::size_t end_;
    std::vector<std::size_t> begins_, strides_;  // by parameter; between its arrays
};

/// `bytes`: a multiple of 8; the digest is of that many bytes from the beginning.
inline std::uint64_t digest(const File& file, std::size_t bytes) {
    Digest digest;
    std::vector<char> piece(std::min(bytes, std::size_t{1} << 20));
    for (std::size_t at = 0; at < bytes; at += piece.size()) {
        const std::size_t n = std::min(piece.size(), bytes - at);
        file.read(at, piece.data(), n);
        digest.update(piece.data(), n);
    }
    return digest.value();
}

/// A directory for one at a time, be they threads, processes or, where the file system does it, machines; let go when
/// it is destroyed or its process dies. Whoever waits for too long, or cannot lock here at all, goes on without.
class Turn {
public:
    explicit Turn(const std::filesystem::path& directory) : folder_{::open(directory.c_str(), O_RDONLY | O_DIRECTORY)} {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (::flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK && std::chrono::steady_clock::now() < deadline) {
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

/// A temporary file with one writer, which locks it: a rank that was stopped may go on to write its own after another one has begun anew. The
/// file is gone again unless it was renamed. A killed writer leaves a file without a lock, and the next writer takes it over.
class Draft {
public:
    /// `name`: without the number that it gets if other writers have the file.
    explicit Draft(const std::string& name) {
        for (int others = 0;;) {
            open(others == 0 ? name : name + "." + std::to_string(others), 0);
            if (::flock(file_->descriptor(), LOCK_EX | LOCK_NB) == 0) {
                if (has_name()) break;
            } else if (errno == EWOULDBLOCK) {
                ++others;
            } else {  // a file system without locks, where each writer needs a name of its own
                ::unlink(path_.c_str());
                open(name + "." + std::to_string(std::random_device{}()), O_EXCL);
                break;
            }
        }
    }
    ~Draft() {
        if (!is_renamed_) ::unlink(path_.c_str());
    }
    Draft(const Draft&) = delete;

    const std::filesystem::path& path() const { return path_; }
    const File& file() const { return *file_; }
    /// Puts it, as it is on disk, in the place of another file.
    void replace(const std::filesystem::path& other) {
        gradsync_train::replace(path_, other);
        is_renamed_ = true;
    }

private:
    void open(std::filesystem::path path, int flags) {
        path_ = std::move(path);
        file_.emplace(path_, O_WRONLY | O_CREAT | O_CLOEXEC | flags, "checkpoint");
        if (!*file_) file_->fail_to_write();
    }
    /// False if the writer before has just renamed or removed it.
    bool has_name() const {
        struct stat own {
        }, named{};
        return ::fstat(file_->descriptor(), &own) == 0 && ::stat(path_.c_str(), &named) == 0 && own.st_dev == named.st_dev &&
               own.st_ino == named.st_ino;
    }

    std::filesystem::path path_;
    std::optional<File> file_;
    bool is_renamed_ = false;
};

}  // namespace checkpoint_detail

inline std::filesystem::path checkpoint_file(const std::filesystem::path& directory) { return directory / "checkpoint.gradsync"; }

/// Writes checkpoints of one run.
class CheckpointWriter {
public:
    /// `model`: its description; `arrays`: of each parameter.
    CheckpointWriter(std::filesystem::path directory, const std::string& model, const Parameters& parameters, std::size_t arrays)
        : directory_{std::move(directory)},
          description_{checkpoint_detail::padded(model)},
          layout_{checkpoint_detail::header_bytes + description_.size(), parameters, arrays} {}

    /// By one rank, with all state of `collect(sink)`, in whatever order it comes. Several ranks may be at it at a time,
    /// in a run that fails: each has a temporary file of its own. `counts()`: is this still the state to be kept?
    void save(
        int rank, const Progress& progress, const std::function<void(const Synchroniser::StateSink&)>& collect,
        const std::function<bool()>& counts = [] { return true; }) const {
        std::filesystem::create_directories(directory_);
        const auto file = checkpoint_file(directory_);
        checkpoint_detail::Draft draft{file.string() + ".new" + std::to_string(rank)};
        const File& out = draft.file();
        // The gaps between arrays are zero.
        for (const std::size_t size : {std::size_t{0}, layout_.end()})
            if (::ftruncate(out.descriptor(), static_cast<off_t>(size)) != 0) out.fail_to_write();
        const std::string head = header(progress);
        out.write(0, head.data(), head.size());
        collect([&](StatePlace place, std::span<const float> piece) { out.write(layout_.at(place), piece.data(), piece.size_bytes()); });
        const std::uint64_t digest = checkpoint_detail::digest(File{draft.path(), O_RDONLY}, layout_.end());
        out.write(layout_.end(), &digest, sizeof digest);
        out.sync();
        if (counts()) draft.replace(file);
    }

    /// For the ranks that are left of a run, if they hold all state: each calls it, as nobody knows who else is left,
    /// and the first to come writes. The others find the very bytes that they hold on disk, and leave it at that. So one
    /// file is written and not one a rank, where all see one disk, and one on each machine where they do not. Returns
    /// whether this rank wrote.
    bool keep(int rank, const Progress& progress, const Synchroniser& sync) const {
        std::filesystem::create_directories(directory_);
        Digest own;
        const std::string head = header(progress);
        own.update(head.data(), head.size());
        sync.for_whole_state([&](StatePlace, std::span<const float> array) { checkpoint_detail::update(own, array); });
        const checkpoint_detail::Turn turn{directory_};
        // The renaming that made the file came after its last byte: the digest at its end stands for all of it.
        if (const File kept{checkpoint_file(directory_), O_RDONLY};
            kept && kept.size() == layout_.end() + 8 && kept.word(layout_.end()) == own.value()) {
            return false;
        }
        save(rank, progress, [&](const Synchroniser::StateSink& sink) { sync.for_whole_state(sink); });
        return true;
    }

private:
    std::string header(const Progress& progress) const {
        std::string bytes(checkpoint_detail::magic.begin(), checkpoint_detail::magic.end());
        for (std::uint64_t x : {checkpoint_detail::version, progress.steps, progress.samples, progress.fingerprint, progress.micro_batches,
                                progress.micro_batch, static_cast<std::uint64_t>(description_.size())}) {
            bytes.append(reinterpret_cast<const char*>(&x), sizeof x);
        }
        return bytes + description_;
    }

    std::filesystem::path directory_;
    std::string description_;
    checkpoint_detail::Layout layout_;
};

/// A checkpoint that is known to be complete. Shared by the ranks of this process.
class Checkpoint {
public:
    explicit Checkpoint(const std::filesystem::path& directory) : path_{checkpoint_file(directory)}, file_{path_, O_RDONLY} {
        if (!file_) throw UsageError("--resume: cannot read " + path_.string() + "; leave out --resume to begin anew");
        using namespace checkpoint_detail;
        size_ = file_.size();
        std::array<char, magic.size()> begin{};
        if (size_ >= begin.size()) file_.read(0, begin.data(), begin.size());
        if (begin != magic) refuse("is not a checkpoint of this program");
        if (size_ >= 16 && file_.word(8) != version) {
            refuse("has format version " + std::to_string(file_.word(8)) + ", and this program reads version " + std::to_string(version));
        }
        const bool intact =
            size_ >= header_bytes + 8 && size_ % 8 == 0 && checkpoint_detail::digest(file_, size_ - 8) == file_.word(size_ - 8);
        if (!intact) refuse("is torn or damaged: its checksum does not match");
        const std::uint64_t description = file_.word(56);
        if (description > size_ - header_bytes - 8 || description % 8 != 0) refuse("is damaged: its description is longer than the file");
        begin_ = header_bytes + description;
        if (progress().micro_batches > most_micro_batches)
            refuse("is damaged: it says that a step has " + std::to_string(progress().micro_batches) + " micro-batches");
    }

    Progress progress() const { return {file_.word(16), file_.word(24), file_.word(32), file_.word(40), file_.word(48)}; }

    /// Two checkpoints that differ have different ones.
    std::uint64_t digest() const { return file_.word(size_ - 8); }

    /// Throws unless the checkpoint is of this very model.
    void expect_model(const std::string& model) const {
        std::string description(begin_ - checkpoint_detail::header_bytes, ' ');
        file_.read(checkpoint_detail::header_bytes, description.data(), description.size());
        if (description != checkpoint_detail::padded(model)) {
            refuse("is of another model (" + description.substr(0, description.find_last_not_of(' ') + 1) + ", not " + model + ")");
        }
    }

    void restore(const Parameters& parameters, std::size_t arrays, Synchroniser& sync) const {
        const checkpoint_detail::Layout layout{begin_, parameters, arrays};
        if (layout.end() + 8 != size_) refuse("has another number of parameters");
        sync.restore(progress().steps,
                     [&](StatePlace place, std::span<float> piece) { file_.read(layout.at(place), piece.data(), piece.size_bytes()); });
    }

private:
    [[noreturn]] void refuse(const std::string& why) const {
        throw UsageError("--resume: " + path_.string() + " " + why + "; leave out --resume to begin anew");
    }

    std::filesystem::path path_;
    File file_;
    std::size_t size_ = 0, begin_ = 0;  // of the file, and of its arrays
};

}  // namespace gradsync_train
