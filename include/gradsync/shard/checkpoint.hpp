// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <future>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "../kernel/passes.hpp"
#include "shard_files.hpp"

/// Checkpoints of sharded training: every rank writes its own shards, and any number of ranks reads them.
///
/// A checkpoint is a directory with one file per rank and a manifest. The files of a new checkpoint have new names. The
/// manifest lists the files that belong together. It is replaced last, atomically, so after any failure the previous
/// checkpoint is valid. Numbers are in the machine's format.
///
/// A rank's file holds a magic, the number of records, the records, and a digest (FNV-1a) of everything before it. A
/// record holds the parameter's name, its shape as text, its element count, the dtype of its arrays, the first element
/// and the element count of this slice, the number of arrays, and the arrays one after the other.

namespace gradsync::inline v0_2 {

namespace detail {

/// Runs `f` on every rank. If it throws on some ranks, every rank throws the error of the lowest one.
/// The communicator stays usable.
void agree_on_success(Backend auto& backend, auto&& f) {
    std::string failure;
    try {
        f();
    } catch (...) {
        failure = handled().what;
        if (failure.empty()) failure = "an exception without text";
    }
    const List<std::string> failures = gather_texts(backend, failure);
    for (std::size_t r = 0; r < failures.size(); ++r)
        if (!failures[r].empty())
            raise(Errc::storage,
                  {.operation = "checkpoint", .rank = named_rank(backend), .peer = named_rank(backend, r)}, "rank ",
                  named_rank(backend, r), ": ", failures[r]);
}

/// Returns the manifest, once all ranks read the same one. Collective.
ShardManifest agree_on_manifest(Backend auto& backend, const std::filesystem::path& directory) {
    ShardManifest manifest;
    for (int attempt = 0;; ++attempt) {
        agree_on_success(backend, [&] { manifest = ShardManifest::read(directory); });
        const List<std::uint64_t> digests = gather_values(backend, {&manifest.digest, 1});
        std::size_t other = 0;
        while (other < digests.size() && digests[other] == digests[0]) ++other;
        if (other == digests.size()) return manifest;
        if (attempt == 5)
            refuse_file(ShardManifest::path(directory), "differs between rank ", named_rank(backend, 0), " and rank ",
                        named_rank(backend, other), "; all machines must share the directory");
        ::usleep(100'000);  // it may have been replaced just now
    }
}

/// Calls `use` with consecutive parts of a view that fit into `room`, in any element type.
void in_pieces(BufferView view, List<std::byte>& room, auto&& use) {
    constexpr std::size_t most = std::size_t{1} << 20;
    room.resize(most);
    for (std::size_t n, first = 0; first < view.count; first += n)
        use(view.subview(first, n = smaller(view.count - first, most / sizeof(double))));
}

/// The shape as text; "" if there is one dimension, or none is given.
inline std::string shape_text(const ParameterView& p) { return p.shape.size() > 1 ? joined(p.shape) : ""; }

/// The head of a record, without its arrays.
struct ShardRecord {
    std::string name, shape;
    std::uint64_t whole, code, first, count, arrays;  ///< `code`: the dtype

    static ShardRecord read(ShardReader& in) {
        ShardRecord r{in.text(), in.text(), in.number(), in.number(), in.number(), in.number(), in.number()};
        if (r.code >= dtype_count || r.count > r.whole || r.first > r.whole - r.count || r.arrays == 0) in.torn();
        if (r.arrays > in.size() || r.count > in.size() / r.width() / r.arrays) in.torn();
        return r;
    }
    DType dtype() const noexcept { return static_cast<DType>(code); }
    std::uint64_t width() const noexcept { return size_of(dtype()); }
};

/// Loads this rank's shards and all frozen parameters from the files of all ranks.
template <class Sharded, class Passes>
class ShardLoader {
public:
    ShardLoader(Sharded& sharded, const Passes& passes) : sharded_(sharded), passes_(passes) {
        for (std::size_t i = 0; i < sharded.parameters().size(); ++i) {
            const ParameterView& p = sharded.parameters()[i];
            wanted_[p.name] = {.parameter = i};
            if (!p.requires_grad) wanted_[p.name].arrays.push_back(p.value);  // whole, of its own type
        }
        sharded.for_each_shard([&](std::size_t i, std::size_t, std::size_t first, BufferView view) {
            Wanted& w = wanted_[sharded.parameters()[i].name];
            w.first = first;
            w.arrays.push_back(view);
        });
    }

    void read_file(const std::filesystem::path& path) {
        ShardReader in(path);
        in.check_magic("a shard of a checkpoint");
        for (std::uint64_t left = in.number(); left != 0; --left) {
            const ShardRecord record = ShardRecord::read(in);
            const auto found = wanted_.find(record.name);
            if (found == wanted_.end())
                refuse_file(path, "has '", record.name,
                            "', and this training has no parameter of that name; load it into the model that saved it");
            Wanted& wanted = found->second;
            const std::uint64_t arrays = wanted.arrays.empty() ? 0 : load(in, path, record, wanted);
            in.skip((record.arrays - arrays) * record.count * record.width());
        }
    }
    void check_complete(const std::filesystem::path& manifest) const {
        for (const auto& [name, w] : wanted_)
            if (!w.arrays.empty() && w.found != w.arrays[0].count &&
                (w.found != 0 || sharded_.parameters()[w.parameter].requires_grad))
                refuse_file(manifest, "is of other parameters: it does not have all of '", name, "'");
    }

private:
    /// The arrays of a parameter that this rank loads, from element `first` on.
    struct Wanted {
        std::size_t parameter = 0, first = 0;
        List<BufferView> arrays = {};
        std::size_t found = 0;  ///< elements that have been read
    };

    /// Loads the wanted elements of a record. Returns the number of its arrays that have been passed.
    std::uint64_t load(ShardReader& in, const std::filesystem::path& path, const ShardRecord& record, Wanted& w) {
        check_record(path, record, w);
        const std::uint64_t from = larger<std::uint64_t>(record.first, w.first);
        const std::uint64_t to = smaller<std::uint64_t>(record.first + record.count, w.first + w.arrays[0].count);
        if (from >= to) return 0;
        if (from != w.first + w.found)  // shards are in the order of the ranks
            refuse_file(path, "has parts of '", record.name, "' that overlap, or do not follow one another");
        for (const BufferView& array : w.arrays) {
            in.skip((from - record.first) * record.width());
            read_elements(in, record.dtype(), array.subview(from - w.first, to - from));
            in.skip((record.first + record.count - to) * record.width());
        }
        w.found += to - from;
        return w.arrays.size();
    }
    void check_record(const std::filesystem::path& path, const ShardRecord& record, const Wanted& w) const {
        const ParameterView& p = sharded_.parameters()[w.parameter];
        if (const std::string own = shape_text(p); own != record.shape && !own.empty() && !record.shape.empty())
            refuse_file(path, "has '", p.name, "' of shape [", record.shape, "]; this training has it of shape [", own,
                        "]");
        const DType own = p.requires_grad ? w.arrays[0].dtype : accumulator_of(w.arrays[0].dtype);
        if (p.gradient.count != record.whole || own != record.dtype() ||
            (p.requires_grad && w.arrays.size() != record.arrays))
            refuse_file(path, "has '", p.name, "' with ", record.whole, " elements of ", record.dtype(), " and ",
                        record.arrays, " arrays; this training has ", p.gradient.count, " of ", own, " and ",
                        w.arrays.size());
        if (!p.requires_grad && p.value.data == nullptr)
            refuse_file(path, "has '", p.name, "', which is frozen here, and has no value to load it into");
    }
    /// Reads consecutive elements of type `dtype`.
    void read_elements(ShardReader& in, DType dtype, BufferView part) {
        in_pieces(part, room_, [&](BufferView piece) {
            const BufferView read = typed_view(room_.data(), piece.count, dtype);
            in.bytes(room_.data(), read.bytes());
            if (dtype == piece.dtype) return passes_.write(room_.data(), piece);
            converted_.resize(piece.bytes());
            kernel::copy(read, typed_view(converted_.data(), piece.count, piece.dtype));
            passes_.write(converted_.data(), piece);
        });
    }

    Sharded& sharded_;
    const Passes& passes_;
    std::unordered_map<std::string, Wanted> wanted_;  ///< by name; at most one slice of a parameter
    List<std::byte> room_, converted_;
};

/// Reads this rank's shards and all frozen parameters, and checks the digests of its part of the files.
void read_shards(const std::filesystem::path& directory, const ShardManifest& manifest, auto& sharded, int rank,
                 int size, const auto& passes) {
    for (auto r = static_cast<std::size_t>(rank); r < manifest.digests.size(); r += static_cast<std::size_t>(size))
        ShardReader(manifest.file(directory, r)).verify(manifest.digests[r]);
    ShardLoader loader(sharded, passes);
    for (std::size_t r = 0; r < manifest.digests.size(); ++r) loader.read_file(manifest.file(directory, r));
    loader.check_complete(ShardManifest::path(directory));
}

/// Loads the state of one group; see `load_shards`. Collective over the group.
ShardManifest load_group(const std::filesystem::path& directory, auto& sharded) {
    auto backend = sharded.backend();
    auto& comm = host_of(backend);
    ShardManifest manifest = agree_on_manifest(comm, directory);
    for (;;) {
        try {
            agree_on_success(
                comm, [&] { read_shards(directory, manifest, sharded, comm.rank(), comm.size(), passes_of(backend)); });
            return manifest;
        } catch (const Error& error) {
            if (error.errc() != Errc::storage) throw;
            // Another job may have saved and removed the parts meanwhile.
            ShardManifest next = agree_on_manifest(comm, directory);
            if (next.digest == manifest.digest) throw;
            manifest = std::move(next);
        }
    }
}

/// Throws unless the names of the parameters are unique and the note is short.
void check_saveable(auto& sharded, const std::string& note) {
    if (note.size() > longest_text) throw std::length_error("the note is longer than 16 MiB");
    std::unordered_set<std::string> names;
    for (std::size_t i = 0; i < sharded.parameters().size(); ++i)
        if (!names.insert(sharded.parameters()[i].name).second)
            throw std::invalid_argument(
                text("two parameters are named '", sharded.parameters()[i].name, "'; a checkpoint finds them by name"));
}

/// Writes the records of this rank's shards.
void write_shards(ShardSink& out, auto& sharded, const auto& passes) {
    List<std::byte> room;
    std::uint64_t records = 0;
    sharded.for_each_shard([&](std::size_t, std::size_t a, std::size_t, BufferView) { records += a == 0 ? 1 : 0; });
    out.number(records);
    sharded.for_each_shard([&](std::size_t i, std::size_t a, std::size_t first, BufferView view) {
        if (a == 0) {
            const ParameterView& p = sharded.parameters()[i];
            out.text(p.name);
            out.text(shape_text(p));
            for (const std::uint64_t x :
                 {std::uint64_t{p.gradient.count}, static_cast<std::uint64_t>(view.dtype), std::uint64_t{first},
                  std::uint64_t{view.count}, std::uint64_t{1 + sharded.optimizer().state_count()}})
                out.number(x);
        }
        in_pieces(view, room, [&](BufferView piece) {
            passes.read(piece, room.data());
            out.bytes(room.data(), piece.bytes());
        });
    });
}

/// A checkpoint from its first step to its last: locks the directory, and names this rank's part; then that is written;
/// then the manifest. The constructor and `finish` are collective.
template <class Backend>
class ShardSaving {
public:
    ShardSaving(const std::filesystem::path& directory, auto& sharded, const std::string& note)
        : directory_(directory), backend_(sharded.backend()) {
        auto& comm = host_of(backend_);
        if (sharded.replica() != 0)
            refuse({"save_shards", named_rank(comm)}, "this is group ", sharded.replica(),
                   "; with hybrid sharding only group 0 saves");
        agree_on_success(comm, [&] {
            if (comm.rank() != 0) return;
            check_saveable(sharded, note);
            std::error_code problem;
            std::filesystem::create_directories(directory_, problem);
            if (problem)
                refuse_file(directory_, "cannot be made: ", problem.message(),
                            "; choose one where this user may write");
            locked_ = ShardManifest::lock(directory_, comm.timeout() / 2);
            manifest_.begin_next(directory_);
        });
        comm.broadcast(buffer(std::span(&manifest_.generation, 1)), 0).wait();
        manifest_.digests.resize(static_cast<std::size_t>(comm.size()));
        manifest_.note = note;
    }

    /// Returns the file of this rank's shards.
    std::filesystem::path part() {
        return manifest_.file(directory_, static_cast<std::size_t>(host_of(backend_).rank()));
    }
    Backend& backend() noexcept { return backend_; }

    /// `written()` returns the digest of this rank's part, when that is on disk, or throws.
    void finish(auto&& written) {
        auto& comm = host_of(backend_);
        std::uint64_t digest = 0;
        try {
            agree_on_success(comm, [&] { digest = written(); });
            comm.all_gather(const_buffer(std::span(&digest, 1)), buffer(manifest_.digests)).wait();
            agree_on_success(comm, [&] {
                if (comm.rank() != 0) return;
                manifest_.check_parts(directory_);
                manifest_.write(directory_);
            });
        } catch (const Error& error) {
            // Every rank knows that no manifest names it.
            if (error.errc() == Errc::storage) ::unlink(part().c_str());
            throw;
        }
        if (comm.rank() == 0) manifest_.remove_others(directory_);
    }

private:
    std::filesystem::path directory_;
    Backend backend_;
    ShardManifest::Folder locked_;
    ShardManifest manifest_;
};

}  // namespace detail

/// Writes the state of all shards to `directory`, which all ranks must be able to reach.
/// Frozen parameters are not saved. Parameters are identified by name, so names must be unique. `note` is free text
/// of the trainer, such as the optimizer's scalars and the position in the data; rank 0's is saved, at most 16 MiB.
/// Call it between steps. Collective.
///
/// Throws Error(storage) on every rank if one could not write, or if another job is saving to the directory. The
/// previous checkpoint then stays valid, and training can continue. Throws Error(invalid_argument) in a group other
/// than 0 of hybrid sharding: only group 0 saves.
void save_shards(const std::filesystem::path& directory, auto& sharded, const std::string& note = {}) {
    detail::ShardSaving<std::remove_cvref_t<decltype(sharded.backend())>> saving(directory, sharded, note);
    saving.finish([&] {
        detail::ShardWriter out(saving.part());
        detail::write_shards(out, sharded, detail::passes_of(saving.backend()));
        return out.finish();
    });
}

/// A checkpoint that is written while the training goes on.
///
///     std::optional<gs::ShardSave> save;
///     for (...) {
///         if (step % 1000 == 0) save.emplace("checkpoint", sharded, note);  // copies this rank's shards
///         if (step % 1000 == 100) save->finish();                          // now the checkpoint counts
///
/// It holds a copy of this rank's shards in memory of the host, and a thread that writes it. Until `finish()` the
/// checkpoint before counts; an object that goes without it leaves that one. Meanwhile no other save to the directory
/// begins. Not thread-safe.
class ShardSave {
public:
    /// The arguments of `save_shards`, and its errors but those of writing. Collective.
    [[nodiscard]] ShardSave(const std::filesystem::path& directory, auto& sharded, const std::string& note = {}) {
        const auto saving = std::make_shared<detail::ShardSaving<std::remove_cvref_t<decltype(sharded.backend())>>>(
            directory, sharded, note);
        detail::ShardImage image;
        detail::agree_on_success(detail::host_of(saving->backend()), [&] {
            std::size_t bytes = 0;
            sharded.for_each_shard([&](auto, auto, auto, BufferView view) { bytes += view.bytes(); });
            image.reserve(bytes + bytes / 16);
            detail::write_shards(image, sharded, detail::passes_of(saving->backend()));
            part_ = saving->part();
        });
        // `deferred`: if there can be no more threads, `finish()` writes.
        const auto policy = std::launch::async | std::launch::deferred;
        written_ = std::async(policy, [image = std::move(image), part = part_] {
            detail::ShardWriter out(part);
            out.bytes(image.content().data(), image.content().size());
            return out.finish();
        });
        finish_ = [this, saving] { saving->finish([&] { return written_.get(); }); };
    }
    ShardSave(ShardSave&&) = delete;  // others refer to it
    ~ShardSave() {
        if (!written_.valid()) return;
        if (!maker_.is_here()) {  // in a forked child: the thread and the file are the parent's
            new auto(std::move(written_));
            return;
        }
        written_.wait();
        ::unlink(part_.c_str());
    }

    /// Waits until all ranks have written, and makes the checkpoint the one that counts. Throws the errors of
    /// `save_shards`, and Error(invalid_argument) at a second call. Collective.
    void finish() {
        if (!finish_) detail::refuse("ShardSave", "finish() was called before; make an object for each checkpoint");
        std::exchange(finish_, {})();
    }

private:
    detail::Maker maker_;
    std::filesystem::path part_;
    std::future<std::uint64_t> written_;
    std::function<void()> finish_;  ///< none after the first call
};

/// Reads a checkpoint of `save_shards` and returns its note. The number of ranks, the stage and the bucket policy may
/// differ: parameters are found by name. A parameter that is frozen now gets the weights that it was saved with, if it
/// was trained then. Other frozen parameters are not restored: call `broadcast_parameters()` first. Throws
/// Error(storage) on every rank if a file is missing or damaged, or if the checkpoint has a parameter that this
/// training does not have, or lacks one that is trained, or if groups of hybrid sharding load different checkpoints;
/// the state is then undefined. Throws Error(invalid_argument) between `finish()` and `step()`; call `discard()` first.
/// Collective.
///
/// If the optimizer has `round`, restore its scalars from the note, then call `publish()`: the weights were rounded
/// with the old ones.
std::string load_shards(const std::filesystem::path& directory, auto& sharded) {
    check_loadable(sharded);
    sharded.flush();  // gathers in flight must not overwrite what is loaded
    detail::ShardManifest manifest;
    std::optional<Error> failure;
    try {
        manifest = detail::load_group(directory, sharded);
    } catch (const Error& error) {
        if (error.errc() != Errc::storage) throw;
        failure = error;
    }
    with_replicas(sharded, [&](auto& replicas) {  // groups may find other files, or none, under the same name
        auto& groups = detail::host_of(replicas);
        const List<std::uint64_t> digests =
            detail::gather_values(groups, List<std::uint64_t>{failure ? 0 : manifest.digest});
        for (std::size_t g = 0; !failure && g < digests.size(); ++g)
            if (digests[g] != manifest.digest)
                detail::raise(Errc::storage,
                              {.operation = "load_shards",
                               .rank = detail::named_rank(groups),
                               .peer = detail::named_rank(groups, g)},
                              "group ", groups.rank(), " has loaded ", directory.string(), ", but group ", g,
                              digests[g] == 0 ? " could not; look at what it says"
                                              : " a different checkpoint; let all groups read the same directory");
    });
    if (failure) throw *failure;
    sharded.publish();
    return manifest.note;
}

}  // namespace gradsync::inline v0_2
