// SPDX-License-Identifier: BSL-1.0
#include "safetensors.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include <gradsync/kernel/tables.hpp>

#include "data.hpp"

namespace gradsync_train {

namespace {

constexpr std::size_t most_header_bytes = 100'000'000;  // as the reference implementation
const std::map<std::string_view, std::size_t> bytes_of_dtype{{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                                                             {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},
                                                             {"I32", 4},  {"F32", 4}, {"U64", 8}, {"I64", 8},     {"F64", 8}};
const std::map<std::string_view, gradsync::DType> loadable{
    {"F32", gradsync::DType::f32}, {"F16", gradsync::DType::f16}, {"BF16", gradsync::DType::bf16}};

/// The file is wrong: a sentence that begins with its name.
struct Wrong {
    std::string what;
};

/// A name from a file, for a sentence: of reasonable length, on one line.
std::string named(std::string_view name) {
    std::string out = "'";
    for (const char c : name.substr(0, 60)) out += c >= 0x20 && c < 0x7f ? c : '?';
    return out + (name.size() > 60 ? "...'" : "'");
}

/// Reads JSON as it comes, so that no text takes more memory than its own length calls for. Throws Wrong: also if an object has a key twice.
class JsonEvents {
public:
    using Path = std::vector<std::string>;  // keys of the value; "" in an array
    /// A text or a whole number; both null for any other value.
    std::function<void(const Path&, const std::string* text, const std::uint64_t* number)> scalar;
    std::function<void(const Path&, bool array)> open;

    static void read(std::string_view text, JsonEvents& events) { nlohmann::json::sax_parse(text.begin(), text.end(), &events); }

    bool null() { return value(); }
    bool boolean(bool) { return value(); }
    bool number_integer(std::int64_t) { return value(); }
    bool number_unsigned(std::uint64_t n) { return value(nullptr, &n); }
    bool number_float(double, const std::string&) { return value(); }
    bool string(std::string& text) { return value(&text); }
    bool binary(std::vector<std::uint8_t>&) { return value(); }
    bool start_object(std::size_t) { return start(false); }
    bool start_array(std::size_t) { return start(true); }
    bool end_object() { return end(); }
    bool end_array() { return end(); }
    bool key(std::string& name) {
        if (!keys_.back().insert(name).second) throw Wrong{"names " + named(name) + " twice"};
        path_.back() = name;
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) {
        throw Wrong{"has no JSON where it should have some (byte " + std::to_string(position) + " of it)"};
    }

private:
    bool value(const std::string* text = nullptr, const std::uint64_t* number = nullptr) {
        scalar(path_, text, number);
        return true;
    }
    bool start(bool array) {
        if (path_.size() == 8) throw Wrong{"has JSON with too many levels"};
        open(path_, array);
        path_.emplace_back();
        keys_.emplace_back();
        return true;
    }
    bool end() {
        path_.pop_back();
        keys_.pop_back();
        return true;
    }

    Path path_;
    std::vector<std::set<std::string>> keys_;
};

std::map<std::string, SafeTensor> read_header(const File& file) {
    const std::size_t size = file.size();
    if (size < 8) throw Wrong{"is no .safetensors file: it has " + std::to_string(size) + " bytes"};
    const std::uint64_t length = file.word(0);
    if (length > most_header_bytes) throw Wrong{"is no .safetensors file: its header would have " + std::to_string(length) + " bytes"};
    if (length > size - 8)
        throw Wrong{"is cut off: its header has " + std::to_string(length) + " bytes, and " + std::to_string(size - 8) + " follow"};
    std::string text(length, ' ');
    file.read(8, text.data(), text.size());
    if (text.empty() || text[0] != '{') throw Wrong{"is no .safetensors file: its header is no JSON object"};

    struct Entry {
        std::string dtype;
        std::vector<std::size_t> shape, offsets;
        bool has_shape = false;
    };
    std::map<std::string, Entry> entries;
    const auto strange = [](const JsonEvents::Path& path) {
        return Wrong{"says something else of " + named(path[0]) + " than dtype, shape and data_offsets"};
    };
    constexpr std::string_view metadata = "__metadata__";
    JsonEvents events;
    events.open = [&](const JsonEvents::Path& path, bool array) {
        if (path.empty()) return;  // begins with {
        if (path.size() == 1 && !array) {
            if (path[0] != metadata) entries[path[0]];
        } else if (path.size() == 2 && array && path[0] != metadata && (path[1] == "shape" || path[1] == "data_offsets")) {
            if (path[1] == "shape") entries[path[0]].has_shape = true;
        } else {
            throw strange(path);
        }
    };
    events.scalar = [&](const JsonEvents::Path& path, const std::string* string, const std::uint64_t* number) {
        if (path[0] == metadata && path.size() == 2 && string != nullptr) return;
        if (path[0] == metadata || path.size() == 1) throw strange(path);
        Entry& entry = entries[path[0]];
        if (path.size() == 2 && path[1] == "dtype" && string != nullptr) entry.dtype = *string;
        else if (auto& numbers = path[1] == "shape" ? entry.shape : entry.offsets;
                 path.size() == 3 && number != nullptr && numbers.size() < 32)
            numbers.push_back(*number);
        else throw strange(path);
    };
    JsonEvents::read(text, events);

    std::map<std::string, SafeTensor> tensors;
    std::vector<std::pair<std::pair<std::size_t, std::size_t>, const std::string*>> by_place;
    for (auto& [name, entry] : entries) {
        const auto wrong = [name = &name](const std::string& what) { return Wrong{"says of " + named(*name) + " " + what}; };
        if (entry.dtype.empty() || !entry.has_shape || entry.offsets.size() != 2)
            throw wrong("too little: a tensor has a dtype, a shape and two data_offsets");
        const auto dtype = bytes_of_dtype.find(entry.dtype);
        if (dtype == bytes_of_dtype.end()) throw wrong("that its dtype is " + named(entry.dtype) + ", which is not known here");
        const std::size_t begin = entry.offsets[0], end = entry.offsets[1];
        if (begin > end || end > size - 8 - length)
            throw wrong("that its data are bytes " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                        std::to_string(size - 8 - length));
        std::size_t bytes = dtype->second;
        for (const std::size_t extent : entry.shape) {
            if (extent != 0 && bytes > std::numeric_limits<std::size_t>::max() / extent)
                throw wrong("that it has more elements than there can be");
            bytes *= extent;
        }
        if (bytes != end - begin)
            throw wrong("that it has " + std::to_string(end - begin) + " bytes, but its shape and dtype make " + std::to_string(bytes));
        by_place.push_back({{begin, end}, &name});
        tensors[name] = {std::move(entry.dtype), std::move(entry.shape), 8 + length + begin, 8 + length + end};
    }
    std::sort(by_place.begin(), by_place.end());
    std::size_t next = 0;
    for (const auto& [place, name] : by_place) {
        if (place.first != next)
            throw Wrong{"has " + std::string(place.first < next ? "an overlap" : "a hole") + " before the data of " + named(*name)};
        next = place.second;
    }
    if (next != size - 8 - length) throw Wrong{"has " + std::to_string(size - 8 - length - next) + " bytes that belong to no tensor"};
    return tensors;
}

/// The file of each tensor.
std::map<std::string, std::string> read_index(const File& file) {
    if (file.size() > most_header_bytes) throw Wrong{"is too large for an index"};
    std::string text(file.size(), ' ');
    file.read(0, text.data(), text.size());
    std::map<std::string, std::string> map;
    bool has_map = false;
    JsonEvents events;
    events.open = [&](const JsonEvents::Path& path, bool array) {
        const bool in_map = !path.empty() && path[0] == "weight_map";
        if (in_map && (array || path.size() > 1)) throw Wrong{"has a weight_map that is no table of files"};
        has_map = has_map || in_map;
    };
    events.scalar = [&](const JsonEvents::Path& path, const std::string* string, const std::uint64_t*) {
        if (path.empty() || path[0] != "weight_map") return;
        if (path.size() != 2 || string == nullptr) throw Wrong{"has a weight_map that is no table of files"};
        if (string->empty() || string->find('/') != std::string::npos || string->find('\0') != std::string::npos || (*string)[0] == '.')
            throw Wrong{"names a file " + named(*string) + ", which is not beside it"};
        map[path[1]] = *string;
    };
    JsonEvents::read(text, events);
    if (!has_map) throw Wrong{"has no weight_map"};
    return map;
}

File open_file(const std::filesystem::path& path) {
    File file{path, O_RDONLY};
    if (!file) throw UsageError("--load-weights: cannot read " + path.string() + "; name a file that this user may read");
    return file;
}

/// Calls `f`; says which file is wrong.
template <class F>
auto naming(const std::filesystem::path& path, F&& f) {
    try {
        return f();
    } catch (const Wrong& wrong) {
        throw UsageError("--load-weights: " + path.string() + " " + wrong.what + "; name another file, or leave out --load-weights");
    }
}

}  // namespace

const SafeWeights::Part& SafeWeights::open(const std::filesystem::path& path) {
    File file = open_file(path);
    auto tensors = naming(path, [&] { return read_header(file); });
    return parts_.emplace_back(Part{path, std::move(file), std::move(tensors)});
}

SafeWeights::SafeWeights(const std::filesystem::path& path) : path_{path} {
    if (std::filesystem::is_directory(path))
        path_ = std::filesystem::exists(safe_index(path)) ? safe_index(path) : path / "model.safetensors";
    if (path_.extension() != ".json") {
        open(path_);
        return;
    }
    const File file = open_file(path_);
    auto map = naming(path_, [&] { return read_index(file); });
    std::set<std::string> names;
    for (const auto& [name, part] : map) names.insert(part);
    for (const std::string& name : names) {
        const Part& part = open(path_.parent_path() / name);
        for (const auto& [tensor, place] : part.tensors)
            naming(part.path, [&, &tensor = tensor] {
                const auto mapped = map.find(tensor);
                if (mapped == map.end() || mapped->second != name)
                    throw Wrong{"holds " + named(tensor) + ", but the index does not say so"};
                map.erase(mapped);
            });
    }
    naming(path_, [&] {
        if (!map.empty())
            throw Wrong{"says that " + named(map.begin()->second) + " holds " + named(map.begin()->first) + ", which it does not"};
    });
}

void SafeWeights::match(const Parameters& parameters) {
    gradsync::kernel::register_kernels<gradsync::DType::f16>();
    gradsync::kernel::register_kernels<gradsync::DType::bf16>();
    naming(path_, [&] {
        std::set<std::string> known;
        for (const Parameter& p : parameters) {
            known.insert(p.name);
            const auto text = [](const std::vector<std::size_t>& shape) {
                std::string out = "[";
                for (const std::size_t extent : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(extent);
                return out + "]";
            };
            for (const Part& part : parts_)
                if (const auto found = part.tensors.find(p.name); found != part.tensors.end()) {
                    const SafeTensor& tensor = found->second;
                    if (!loadable.contains(tensor.dtype))
                        throw Wrong{"has " + named(p.name) + " as " + tensor.dtype + ", and only F32, F16 and BF16 are read"};
                    if (tensor.shape != p.shape)
                        throw Wrong{"is of another model: " + named(p.name) + " has the shape " + text(tensor.shape) + " there, and " +
                                    text(p.shape) + " here"};
                    places_.push_back({&part.file, &tensor});
                }
            if (places_.size() != known.size()) throw Wrong{"is of another model: it has no " + named(p.name)};
        }
        for (const Part& part : parts_)
            for (const auto& [name, tensor] : part.tensors)
                if (!known.contains(name)) throw Wrong{"is of another model: it has " + named(name) + ", which is unknown here"};
    });
}

void SafeWeights::read(std::size_t i, std::size_t first, std::span<float> out) const {
    const SafeTensor& tensor = *places_[i].second;
    const gradsync::DType dtype = loadable.find(tensor.dtype)->second;
    const std::size_t width = gradsync::size_of(dtype);
    std::vector<std::byte> raw(dtype == gradsync::DType::f32 ? 0 : out.size() * width);
    void* const to = raw.empty() ? static_cast<void*>(out.data()) : raw.data();
    places_[i].first->read(tensor.begin + first * width, to, out.size() * width);
    if (!raw.empty()) gradsync::kernel::convert(raw.data(), dtype, out.data(), gradsync::DType::f32, out.size());
}

std::uint64_t SafeWeights::digest() const {
    Digest digest;
    std::vector<float> piece;
    for (std::size_t i = 0; i < places_.size(); ++i) {
        const SafeTensor& tensor = *places_[i].second;
        const std::size_t count = (tensor.end - tensor.begin) / bytes_of_dtype.at(tensor.dtype);
        for (std::size_t first = 0; first < count; first += piece.size()) {
            piece.resize(std::min(count - first, std::size_t{1} << 18));
            read(i, first, piece);
            digest.update(piece.data(), piece.size() * sizeof(float));
        }
    }
    return digest.value();
}

SafeWriter::SafeWriter(const std::filesystem::path& path, const Parameters& parameters, const std::vector<std::size_t>& own, int rank)
    : path_{path},
      temporary_{path.string() + ".new" + std::to_string(rank)},
      file_{temporary_.path, O_WRONLY | O_CREAT | O_TRUNC, "file of weights"} {
    if (!file_) file_.fail_to_write();
    nlohmann::ordered_json json{{"__metadata__", {{"format", "pt"}}}};
    std::size_t next = 0;
    for (const std::size_t i : own) {
        const std::size_t end = next + parameters[i].count * sizeof(float);
        json[parameters[i].name] = {{"dtype", "F32"}, {"shape", parameters[i].shape}, {"data_offsets", {next, end}}};
        places_[i] = next;
        next = end;
    }
    std::string header = json.dump();
    header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the data are aligned
    const std::uint64_t length = header.size();
    file_.write(0, &length, sizeof length);
    file_.write(sizeof length, header.data(), header.size());
    for (auto& [i, place] : places_) place += sizeof length + header.size();
}

void SafeWriter::write(std::size_t i, std::span<const float> weights) const {
    if (const auto place = places_.find(i); place != places_.end()) file_.write(place->second, weights.data(), weights.size_bytes());
}

void SafeWriter::finish() {
    file_.finish();
    replace(temporary_.path, path_);
}

std::filesystem::path safe_index(const std::filesystem::path& folder) { return folder / "model.safetensors.index.json"; }

std::vector<std::string> safe_parts(const std::filesystem::path& folder) {
    std::set<std::string> names;
    try {
        if (const File file{safe_index(folder), O_RDONLY}; file)
            for (const auto& [tensor, part] : read_index(file)) names.insert(part);
    } catch (const Wrong&) {
        return {};
    }
    return {names.begin(), names.end()};
}

void write_safe_index(const std::filesystem::path& folder, const Parameters& parameters, const std::vector<std::string>& files) {
    nlohmann::ordered_json json{{"metadata", {{"total_size", parameters.count() * sizeof(float)}}}};
    for (std::size_t i = 0; i < parameters.size(); ++i) json["weight_map"][parameters[i].name] = files[i];
    const std::string text = json.dump(2) + "\n";
    const Temporary temporary{safe_index(folder).string() + ".new"};
    File file{temporary.path, O_WRONLY | O_CREAT | O_TRUNC, "index"};
    if (!file) file.fail_to_write();
    file.write(0, text.data(), text.size());
    file.finish();
    replace(temporary.path, safe_index(folder));
}

}  // namespace gradsync_train
