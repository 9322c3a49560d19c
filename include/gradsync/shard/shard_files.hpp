// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/file.h>

#include <filesystem>
#include <memory>
#include <system_error>

#include "../core/forked.hpp"
#include "../core/open_file.hpp"
#include "../core/unique_handle.hpp"
#include "../engine/verification.hpp"

/// The files of a checkpoint of sharded training; checkpoint.hpp documents their contents.

namespace gradsync::inline v0_2::detail {

inline constexpr std::uint64_t longest_text = std::uint64_t{1} << 24;  ///< bytes; a longer text means a damaged file
inline constexpr char shard_magic[] = {'g', 's', 's', 'h', 'a', 'r', 'd', '2'};

[[noreturn, gnu::cold]] void refuse_file(const std::filesystem::path& path, const auto&... what) {
    raise(Errc::storage, {.operation = "checkpoint"}, path.empty() ? "\"\"" : path.string(), " ", what...);
}

using ShardFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

/// Takes the bytes of a file.
class ShardSink {
public:
    virtual ~ShardSink() = default;
    virtual void bytes(const void* data, std::size_t n) = 0;
    void number(std::uint64_t x) { bytes(&x, sizeof x); }
    void text(const std::string& text) {
        number(text.size());
        bytes(text.data(), text.size());
    }
};

/// Keeps them, to be written later.
class ShardImage final : public ShardSink {
public:
    void reserve(std::size_t n) { content_.reserve(n); }
    void bytes(const void* data, std::size_t n) override {
        if (n == 0) return;
        content_.resize(content_.size() + n);
        std::memcpy(content_.end() - n, data, n);
    }
    const List<std::byte>& content() const noexcept { return content_; }

private:
    List<std::byte> content_;
};

/// Writes a file, and removes it unless `finish()` succeeds.
class ShardWriter final : public ShardSink {
public:
    explicit ShardWriter(std::filesystem::path path)
        : path_(std::move(path)), file_(open_file(path_, O_WRONLY | O_CREAT | O_TRUNC, "wb"), &std::fclose) {
        if (!file_) fail();
        bytes(shard_magic, sizeof shard_magic);
    }
    ~ShardWriter() override {
        if (!finished_) std::remove(path_.c_str());
    }

    void bytes(const void* data, std::size_t n) override {
        if (n != 0 && std::fwrite(data, n, 1, file_.get()) != 1) fail();
        digest_.add(data, n);
    }
    /// Writes the digest at the end of the file and returns it. The bytes are then on disk.
    std::uint64_t finish() {
        const std::uint64_t digest = digest_.value();
        number(digest);
        if (std::fflush(file_.get()) != 0 || ::fsync(::fileno(file_.get())) != 0 || std::fclose(file_.release()) != 0)
            fail();
        finished_ = true;
        return digest;
    }

private:
    [[noreturn, gnu::cold]] void fail() const {
        refuse_file(path_, "cannot be written: ", open_problem(),
                    is_no_regular_file() ? "; remove it"
                    : errno == ENOENT
                        ? "; all ranks must see the directory"
                        : "; look at its owner and the space left (an older checkpoint there stays valid)");
    }

    std::filesystem::path path_;
    ShardFile file_;
    Digest digest_;
    bool finished_ = false;
};

class ShardReader {
public:
    explicit ShardReader(std::filesystem::path path)
        : path_(std::move(path)), file_(open_file(path_, O_RDONLY, "rb"), &std::fclose) {
        if (!file_ || ::fseeko(file_.get(), 0, SEEK_END) != 0)
            refuse_file(path_, "cannot be read: ", open_problem(),
                        is_no_regular_file() ? "; load another checkpoint"
                        : errno == ENOENT    ? "; save there first, and let all ranks see the same directory"
                                             : "; let this user read it on all ranks");
        size_ = static_cast<std::uint64_t>(::ftello(file_.get()));
        std::rewind(file_.get());
    }

    std::uint64_t size() const noexcept { return size_; }

    /// Refuses a file with a different magic: it "is not `what`".
    void check_magic(const char* what) {
        char magic[sizeof shard_magic];
        bytes(magic, sizeof magic);
        if (std::memcmp(magic, shard_magic, sizeof magic) != 0) refuse_file(path_, "is not ", what);
    }
    void bytes(void* data, std::size_t n) {
        if (n != 0 && std::fread(data, n, 1, file_.get()) != 1) torn();
    }
    std::uint64_t number() {
        std::uint64_t x = 0;
        bytes(&x, sizeof x);
        return x;
    }
    std::string text() {
        const std::uint64_t size = number();
        if (size > longest_text || size > size_) torn();
        std::string text(size, '\0');
        bytes(text.data(), size);
        return text;
    }
    void skip(std::uint64_t n) {
        if (::fseeko(file_.get(), static_cast<off_t>(n), SEEK_CUR) != 0) torn();
    }
    /// Throws unless the file is complete and ends with `digest`.
    void verify(std::uint64_t digest) {
        if (size_ < sizeof digest) torn();
        std::rewind(file_.get());
        List<char> piece(smaller<std::uint64_t>(size_, std::uint64_t{1} << 20));
        Digest actual;
        for (std::uint64_t left = size_ - sizeof digest; left != 0;) {
            const std::size_t n = smaller<std::uint64_t>(left, piece.size());
            bytes(piece.data(), n);
            actual.add(piece.data(), n);
            left -= n;
        }
        if (actual.value() != digest || number() != digest) torn();
    }
    [[noreturn]] void torn() const {
        refuse_file(path_, "is torn or damaged; load another checkpoint, or save to another directory");
    }

private:
    std::filesystem::path path_;
    ShardFile file_;
    std::uint64_t size_ = 0;
};

/// The list of files that make up a checkpoint.
struct ShardManifest {
    std::uint64_t generation = 0;
    List<std::uint64_t> digests;  ///< by rank
    std::string note;
    std::uint64_t digest = 0;  ///< digest of the file that was read

    static std::filesystem::path path(const std::filesystem::path& directory) {
        return directory / "manifest.gradsync";
    }
    std::filesystem::path file(const std::filesystem::path& directory, std::size_t rank) const {
        return directory / text("shard-", generation, "-", rank, "-of-", digests.size(), ".gradsync");
    }

    static ShardManifest read(const std::filesystem::path& directory) {
        ShardReader in(path(directory));
        in.check_magic("the manifest of a sharded checkpoint");
        ShardManifest manifest;
        manifest.generation = in.number();
        const std::uint64_t ranks = in.number();
        if (ranks == 0 || ranks > 1u << 24) in.torn();
        for (std::uint64_t r = 0; r < ranks; ++r) manifest.digests.push_back(in.number());
        manifest.note = in.text();
        manifest.digest = in.number();
        in.verify(manifest.digest);
        return manifest;
    }

    /// Atomic: readers see the old manifest or the new one.
    void write(const std::filesystem::path& directory) const {
        const std::filesystem::path temporary = path(directory).string() + ".new";
        ShardWriter out(temporary);
        out.number(generation);
        out.number(digests.size());
        for (const std::uint64_t of_part : digests) out.number(of_part);
        out.text(note);
        out.finish();
        std::filesystem::rename(temporary, path(directory));
        const Folder folder = open(directory);
        if (folder) ::fsync(folder.get());
    }

    using Folder = UniqueHandle<int, close_descriptor, -1>;
    /// A forked child does not keep it: a lock would last as long as the child.
    static Folder open(const std::filesystem::path& directory) {
        return Folder(keep_from_children(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
    }
    /// Keeps others from saving to the directory while the result lives, if its file system supports locks. Waits for a
    /// while, as a rank that the others have gone on without may have to be ended first. Throws if another job saves.
    static Folder lock(const std::filesystem::path& directory, std::chrono::nanoseconds limit) {
        Folder folder = open(directory);
        const auto until =
            std::chrono::steady_clock::now() + smaller<std::chrono::nanoseconds>(limit, std::chrono::seconds(3));
        while (folder && ::flock(folder.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            if (std::chrono::steady_clock::now() > until)
                refuse_file(directory, "is where another job saves a checkpoint now; ",
                            "give each job a directory of its own (and end a ShardSave before the next save)");
            ::usleep(10'000);
        }
        return folder;
    }

    /// Throws unless this machine sees every rank's part.
    void check_parts(const std::filesystem::path& directory) const {
        for (std::size_t r = 0; r < digests.size(); ++r) {
            const ShardFile part(open_file(file(directory, r), O_RDONLY, "rb"), &std::fclose);
            std::uint64_t end = 0;
            if (!part || ::fseeko(part.get(), -static_cast<off_t>(sizeof end), SEEK_END) != 0 ||
                std::fread(&end, sizeof end, 1, part.get()) != 1 || end != digests[r])
                refuse_file(file(directory, r), "of rank ", r,
                            " cannot be seen from rank 0; all machines must share the directory");
        }
    }
    /// Makes this the next checkpoint of the directory. Skips generations that have parts: a stopped rank of an
    /// interrupted save may still write one.
    void begin_next(const std::filesystem::path& directory) {
        if (std::filesystem::exists(path(directory))) generation = read(directory).generation + 1;
        for (bool is_taken = true; is_taken;) {
            is_taken = false;
            for_each_part(directory, [&](const auto&, unsigned long long of_part, unsigned long long) {
                is_taken = is_taken || of_part == generation;
            });
            if (is_taken) ++generation;
        }
    }
    /// Removes the parts that this manifest does not name: those of older checkpoints and of saves that were killed.
    void remove_others(const std::filesystem::path& directory) const {
        std::error_code ignored;
        for_each_part(directory,
                      [&](const std::filesystem::path& part, unsigned long long of_part, unsigned long long ranks) {
                          if (of_part != generation || ranks != digests.size()) std::filesystem::remove(part, ignored);
                      });
    }

private:
    /// Calls `f(path, generation, ranks)` with each file that has the name of a part.
    static void for_each_part(const std::filesystem::path& directory, auto&& f) {
        std::error_code ignored;
        for (std::filesystem::directory_iterator at(directory, ignored), end; at != end; at.increment(ignored)) {
            const std::string name = at->path().filename().string();
            unsigned long long of_part, rank, ranks;
            if (std::sscanf(name.c_str(), "shard-%llu-%llu-of-%llu", &of_part, &rank, &ranks) == 3 &&
                name == text("shard-", of_part, "-", rank, "-of-", ranks, ".gradsync") &&
                at->symlink_status(ignored).type() == std::filesystem::file_type::regular)
                f(at->path(), of_part, ranks);
        }
    }
};

}  // namespace gradsync::inline v0_2::detail
