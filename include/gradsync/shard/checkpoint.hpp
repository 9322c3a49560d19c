// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <system_error>
#include <unordered_map>
#include <unordered_set>

#include "../core/unique_handle.hpp"
#include "../engine/verification.hpp"

/// Checkpoints of sharded trainings: every rank writes its own shards, and any number of ranks reads them.
///
/// A checkpoint is a directory with one file per rank and a manifest. The files of a new checkpoint have new names. The manifest says which
/// files belong together, and is replaced last, atomically: after any failure the last checkpoint is valid. Numbers are in the machine's format.
///
/// The file of a rank holds a magic, the number of records, the records, and a digest (FNV-1a) of all before it. A record holds the
/// parameter's name, its element count, the dtype of its arrays, the first element and the element count of this slice, the number of
/// arrays, and the arrays one after the other.

namespace gradsync::inline v0_2 {

namespace detail {

inline constexpr std::uint64_t longest_text = std::uint64_t{1} << 24;  ///< bytes; a longer text means a damaged file
inline constexpr char shard_magic[] = {'g', 's', 's', 'h', 'a', 'r', 'd', '1'};

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_file(const std::filesystem::path& path, const std::string& what) {
    raise(Errc::storage, detail::text(path.string(), " ", what), {.operation = "checkpoint"});
}

using ShardFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

/// Writes a file, and removes it unless `finish()` succeeds.
class ShardWriter {
public:
    explicit ShardWriter(std::filesystem::path path) : path_(std::move(path)), file_(std::fopen(path_.c_str(), "wb"), &std::fclose) {
        if (!file_) fail();
        bytes(shard_magic, sizeof shard_magic);
    }
    ~ShardWriter() {
        if (!finished_) std::remove(path_.c_str());
    }

    void bytes(const void* data, std::size_t n) {
        if (n != 0 && std::fwrite(data, n, 1, file_.get()) != 1) fail();
        digest_.add(data, n);
    }
    void number(std::uint64_t x) { bytes(&x, sizeof x); }
    void text(const std::string& text) {
        number(text.size());
        bytes(text.data(), text.size());
    }
    /// Writes the digest at the end of the file and returns it. The bytes are on disk then.
    std::uint64_t finish() {
        const std::uint64_t digest = digest_.value();
        number(digest);
        if (std::fflush(file_.get()) != 0 || ::fsync(::fileno(file_.get())) != 0 || std::fclose(file_.release()) != 0) fail();
        finished_ = true;
        return digest;
    }

private:
    [[noreturn, gnu::cold]] void fail() const {
        refuse_file(path_, detail::text("cannot be written: ", std::strerror(errno),
                                        errno == ENOENT ? "; all ranks must see the directory" : "; the last checkpoint is still valid"));
    }

    std::filesystem::path path_;
    ShardFile file_;
    Digest digest_;
    bool finished_ = false;
};

class ShardReader {
public:
    explicit ShardReader(std::filesystem::path path) : path_(std::move(path)), file_(std::fopen(path_.c_str(), "rb"), &std::fclose) {
        if (!file_ || ::fseeko(file_.get(), 0, SEEK_END) != 0)
            refuse_file(path_, detail::text("cannot be read: ", std::strerror(errno), "; all ranks must see the same directory"));
        size_ = static_cast<std::uint64_t>(::ftello(file_.get()));
        std::rewind(file_.get());
    }

    std::uint64_t size() const noexcept { return size_; }

    /// Refuses a file whose magic is another one: it "is not `what`".
    void check_magic(const char* what) {
        char magic[sizeof shard_magic];
        bytes(magic, sizeof magic);
        if (std::memcmp(magic, shard_magic, sizeof magic) != 0) refuse_file(path_, detail::text("is not ", what));
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
    /// Throws unless the file is whole and ends with `digest`.
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
    [[noreturn]] void torn() const { refuse_file(path_, "is torn or damaged; use another checkpoint"); }

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
    std::uint64_t digest = 0;  ///< of the file that was read

    static std::filesystem::path path(const std::filesystem::path& directory) { return directory / "manifest.gradsync"; }
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
        {
            ShardWriter out(temporary);
            out.number(generation);
            out.number(digests.size());
            for (const std::uint64_t of_part : digests) out.number(of_part);
            out.text(note);
            out.finish();
        }
        std::filesystem::rename(temporary, path(directory));
        const Folder folder = open(directory);
        if (folder) ::fsync(folder.get());
    }

    using Folder = UniqueHandle<int, ::close, -1>;
    static Folder open(const std::filesystem::path& directory) {
        return Folder(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    }
    /// Keeps others from saving to the directory until the result goes, if its file system knows locks. Throws if another one does.
    static Folder lock(const std::filesystem::path& directory) {
        Folder folder = open(directory);
        if (folder && ::flock(folder.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
            refuse_file(directory, "is where another job saves a checkpoint now; give each job a directory of its own");
        return folder;
    }

    /// Throws unless this machine sees every rank's part.
    void check_parts(const std::filesystem::path& directory) const {
        for (std::size_t r = 0; r < digests.size(); ++r) {
            const ShardFile part(std::fopen(file(directory, r).c_str(), "rb"), &std::fclose);
            std::uint64_t end = 0;
            if (!part || ::fseeko(part.get(), -static_cast<off_t>(sizeof end), SEEK_END) != 0 ||
                std::fread(&end, sizeof end, 1, part.get()) != 1 || end != digests[r])
                refuse_file(file(directory, r), text("of rank ", r, " cannot be seen from rank 0; all machines must share the directory"));
        }
    }
    /// Removes the parts that this manifest does not name: those of older checkpoints, and of saves that were killed.
    void remove_others(const std::filesystem::path& directory) const {
        std::error_code ignored;
        for (std::filesystem::directory_iterator at(directory, ignored), end; at != end; at.increment(ignored)) {
            const std::string name = at->path().filename().string();
            unsigned long long named, rank, ranks;
            if (std::sscanf(name.c_str(), "shard-%llu-%llu-of-%llu", &named, &rank, &ranks) == 3 &&
                name == text("shard-", named, "-", rank, "-of-", ranks, ".gradsync") && (named != generation || ranks != digests.size()) &&
                at->symlink_status(ignored).type() == std::filesystem::file_type::regular)
                std::filesystem::remove(at->path(), ignored);
        }
    }
};

/// Runs `f` on every rank. If it throws on some, every rank throws the error of the lowest of them, and the communicator stays usable.
template <Backend B, class F>
void agree_on_success(B& backend, F&& f) {
    std::string failure;
    try {
        f();
    } catch (const std::exception& e) {
        failure = e.what();
        if (failure.empty()) failure = "an exception without text";
    }
    const List<std::string> failures = gather_texts(backend, failure);
    for (std::size_t r = 0; r < failures.size(); ++r)
        if (!failures[r].empty())
            raise(Errc::storage, text("rank ", r, ": ", failures[r]),
                  {.operation = "checkpoint", .rank = backend.rank(), .peer = static_cast<int>(r)});
}

/// The manifest, when all ranks read the same one. Collective.
template <Backend B>
ShardManifest agree_on_manifest(B& backend, const std::filesystem::path& directory) {
    ShardManifest manifest;
    for (int attempt = 0;; ++attempt) {
        agree_on_success(backend, [&] { manifest = ShardManifest::read(directory); });
        const List<std::uint64_t> digests = gather_values(backend, {&manifest.digest, 1});
        std::size_t other = 0;
        while (other < digests.size() && digests[other] == digests[0]) ++other;
        if (other == digests.size()) return manifest;
        if (attempt == 5)
            refuse_file(ShardManifest::path(directory),
                        text("differs between rank 0 and rank ", other, "; all machines must share the directory"));
        ::usleep(100'000);  // it may have been replaced just now
    }
}

/// Reads this rank's shards, and checks the digests of its part of the files.
template <class Sharded>
void read_shards(const std::filesystem::path& directory, const ShardManifest& manifest, Sharded& sharded, int rank, int size) {
    for (auto r = static_cast<std::size_t>(rank); r < manifest.digests.size(); r += static_cast<std::size_t>(size))
        ShardReader(manifest.file(directory, r)).verify(manifest.digests[r]);

    struct Wanted {
        std::size_t parameter = 0, first = 0;
        List<BufferView> arrays;
        std::size_t found = 0;
    };
    std::unordered_map<std::string, Wanted> wanted;  // this rank has at most one slice of a parameter
    sharded.for_each_shard([&](std::size_t i, std::size_t first, std::size_t, BufferView view) {
        Wanted& w = wanted[sharded.parameters()[i].name];
        w.parameter = i;
        w.first = first;
        w.arrays.push_back(view);
    });
    for (std::size_t r = 0; r < manifest.digests.size(); ++r) {
        const std::filesystem::path path = manifest.file(directory, r);
        ShardReader in(path);
        in.check_magic("a shard of a checkpoint");
        const std::uint64_t most = in.size();  // bytes of a record
        for (std::uint64_t left = in.number(); left != 0; --left) {
            const std::string name = in.text();
            const std::uint64_t whole = in.number(), dtype = in.number(), first = in.number(), count = in.number(), arrays = in.number();
            if (dtype >= dtype_count || count > whole || first > whole - count || arrays == 0) in.torn();
            const std::uint64_t width = size_of(static_cast<DType>(dtype));
            if (arrays > most || count > most / width / arrays) in.torn();
            std::uint64_t skip = count * width * arrays;
            if (const auto found = wanted.find(name); found != wanted.end()) {
                Wanted& w = found->second;
                const ParameterView& p = sharded.parameters()[w.parameter];
                if (p.gradient.count != whole || static_cast<std::uint64_t>(w.arrays[0].dtype) != dtype || w.arrays.size() != arrays)
                    refuse_file(path,
                                text("has '", name, "' with ", whole, " elements of ", static_cast<DType>(dtype), " and ", arrays,
                                     " arrays; this training has ", p.gradient.count, " of ", w.arrays[0].dtype, " and ", w.arrays.size()));
                const std::uint64_t from = larger<std::uint64_t>(first, w.first);
                const std::uint64_t to = smaller<std::uint64_t>(first + count, w.first + w.arrays[0].count);
                if (from < to) {
                    if (from != w.first + w.found)  // ranks have shards in their order
                        refuse_file(path, text("has parts of '", name, "' that overlap, or do not follow one another"));
                    for (const BufferView& array : w.arrays) {
                        const BufferView part = array.subview(from - w.first, to - from);
                        in.skip((from - first) * width);
                        in.bytes(part.data, part.bytes());
                        in.skip((first + count - to) * width);
                    }
                    w.found += to - from;
                    skip = 0;
                }
            }
            in.skip(skip);
        }
    }
    for (const auto& [name, w] : wanted)
        if (w.found != w.arrays[0].count)
            refuse_file(ShardManifest::path(directory), text("is of other parameters: it does not have all of '", name, "'"));
}

}  // namespace detail

/// Writes the state of all shards to `directory`, which all ranks must reach. Frozen parameters are not saved. Names identify parameters,
/// so they must be unique. `note` is free text of the trainer, such as the optimizer's scalars and the position in the data: rank 0's is
/// saved, 16 MiB at most. Between steps. Collective.
///
/// Throws Error(storage) on every rank if one could not write, or another job saves to the directory now: the previous checkpoint stays valid,
/// and training can go on. Throws Error(invalid_argument) in a group other than 0 of hybrid sharding: group 0 alone saves.
template <class Sharded>
void save_shards(const std::filesystem::path& directory, Sharded& sharded, const std::string& note = {}) {
    auto comm = sharded.backend();
    if (sharded.replica() != 0)
        detail::refuse("save_shards", detail::text("this is group ", sharded.replica(), "; with hybrid sharding group 0 alone saves"),
                       comm.rank());
    detail::ShardManifest manifest;
    detail::ShardManifest::Folder locked;
    detail::agree_on_success(comm, [&] {
        if (comm.rank() != 0) return;
        if (note.size() > detail::longest_text) throw std::length_error("the note is longer than 16 MiB");
        std::unordered_set<std::string> names;
        for (std::size_t i = 0; i < sharded.parameters().size(); ++i)
            if (!names.insert(sharded.parameters()[i].name).second)
                throw std::invalid_argument(
                    detail::text("two parameters are named '", sharded.parameters()[i].name, "'; a checkpoint tells them by their names"));
        std::filesystem::create_directories(directory);
        locked = detail::ShardManifest::lock(directory);
        if (std::filesystem::exists(detail::ShardManifest::path(directory)))
            manifest.generation = detail::ShardManifest::read(directory).generation + 1;
    });
    comm.broadcast(buffer(std::span(&manifest.generation, 1)), 0).wait();

    manifest.digests.resize(static_cast<std::size_t>(comm.size()));
    manifest.note = note;
    const std::filesystem::path part = manifest.file(directory, static_cast<std::size_t>(comm.rank()));
    std::uint64_t digest = 0;
    try {
        detail::agree_on_success(comm, [&] {
            detail::ShardWriter out(part);
            std::uint64_t records = 0;
            sharded.for_each_shard([&](std::size_t, std::size_t, std::size_t a, BufferView) { records += a == 0 ? 1 : 0; });
            out.number(records);
            sharded.for_each_shard([&](std::size_t i, std::size_t first, std::size_t a, BufferView view) {
                if (a == 0) {
                    out.text(sharded.parameters()[i].name);
                    for (const std::uint64_t x :
                         {std::uint64_t{sharded.parameters()[i].gradient.count}, static_cast<std::uint64_t>(view.dtype),
                          std::uint64_t{first}, std::uint64_t{view.count}, std::uint64_t{sharded.array_count()}})
                        out.number(x);
                }
                out.bytes(view.data, view.bytes());
            });
            digest = out.finish();
        });
        comm.all_gather(const_buffer(std::span(&digest, 1)), buffer(manifest.digests)).wait();
        detail::agree_on_success(comm, [&] {
            if (comm.rank() != 0) return;
            manifest.check_parts(directory);
            manifest.write(directory);
        });
    } catch (const Error& error) {
        if (error.errc() == Errc::storage) ::unlink(part.c_str());  // every rank knows that no manifest names it
        throw;
    }
    if (comm.rank() == 0) manifest.remove_others(directory);
}

/// Reads a checkpoint of `save_shards` and returns its note. The number of ranks, the stage and the bucket policy may differ: parameters
/// are found by name. Collective. Throws Error(storage) on every rank if a file is missing or damaged, or if it is of other parameters; the
/// state is undefined then.
template <class Sharded>
std::string load_shards(const std::filesystem::path& directory, Sharded& sharded) {
    auto comm = sharded.backend();
    sharded.flush();  // gathers in flight must not overwrite what is loaded
    detail::ShardManifest manifest = detail::agree_on_manifest(comm, directory);
    for (;;) {
        try {
            detail::agree_on_success(comm, [&] { detail::read_shards(directory, manifest, sharded, comm.rank(), comm.size()); });
            break;
        } catch (const Error& error) {
            if (error.errc() != Errc::storage) throw;
            // Another job may have saved meanwhile, and removed the parts.
            detail::ShardManifest next = detail::agree_on_manifest(comm, directory);
            if (next.digest == manifest.digest) throw;
            manifest = std::move(next);
        }
    }
    sharded.publish();
    return manifest.note;
}

}  // namespace gradsync::inline v0_2
