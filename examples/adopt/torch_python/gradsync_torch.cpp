// SPDX-License-Identifier: BSL-1.0
// gradsync for Python's torch.nn.Module, over TCP and shared memory. setup.py builds it; train.py and course.py use it.
//
//     import gradsync_torch as gs
//     comm = gs.Comm()                                  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//     sync = gs.Reducer(comm, model)                    # as DistributedDataParallel
//     sharded = gs.ShardedOptimizer(comm, model)        # as ZeroRedundancyOptimizer, with gradients sharded, too
//     sharded = gs.FullyShard(comm, model, ["block"])   # as fully_shard
//
// Reducer and ShardedOptimizer also take a list of parameters, or of pairs (name, parameter). Give each object a communicator of its own,
// comm.duplicate(), if several live at a time.

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/interop/torch_reducer.hpp>
#include <gradsync/interop/torch_sharded.hpp>

#include <cstdlib>
#include <map>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace gs = gradsync;
namespace py = pybind11;

namespace {

using Comm = gs::TcpBackend;
using Reducer = gs::TorchReducer<Comm>;
using ShardedOptimizer = gs::TorchShardedOptimizer<Comm, gs::ExternalOptimizer, gs::Zero2>;
using FullyShard = gs::TorchFullyShard<Comm, gs::ExternalOptimizer>;
using Unlocked = py::call_guard<py::gil_scoped_release>;  // other threads of Python run while a rank waits

/// The job of the launcher's variables. Without RANK, the ranks of torch.distributed, which meet at the port after its own.
gs::Job find_job() {
    const py::module_ dist = py::module_::import("torch.distributed");
    const auto says = [&](const char* question) { return dist.attr(question)().cast<bool>(); };
    if (std::getenv("RANK") != nullptr || !says("is_available") || !says("is_initialized")) return gs::Job::from_environment();
    std::map<std::string, std::string> known;
    known["RANK"] = std::to_string(dist.attr("get_rank")().cast<int>());
    known["WORLD_SIZE"] = std::to_string(dist.attr("get_world_size")().cast<int>());
    if (const char* const port = std::getenv("MASTER_PORT")) known["MASTER_PORT"] = std::to_string(std::atoi(port) + 1);
    return gs::Job::from([&](const char* name) -> const char* {
        const auto found = known.find(name);
        return found == known.end() ? std::getenv(name) : found->second.c_str();
    });
}

Comm make_comm() {
    const gs::Job job = find_job();
    const py::gil_scoped_release unlocked;
    gs::TcpRendezvous rendezvous(job);
    return Comm(rendezvous);
}

std::string type_of(py::handle object) { return py::type::handle_of(object).attr("__name__").cast<std::string>(); }

/// The parameters and buffers of a module, or the tensors of an iterable. A tensor without a name is called by its position.
gs::TorchParameters parameters_of(const py::object& trained, const std::string& face) {
    const bool module = py::hasattr(trained, "named_parameters");
    if (!module && (THPVariable_Check(trained.ptr()) || !py::isinstance<py::iterable>(trained)))
        throw py::type_error(face + ": pass a module, or a list of parameters or of pairs (name, parameter), not a " + type_of(trained));
    std::vector<std::pair<std::string, at::Tensor>> named;
    std::map<std::string, std::size_t> place_of;
    std::map<const void*, std::string> name_of;
    for (const py::handle item : module ? trained.attr("named_parameters")() : trained) {
        std::string name = std::to_string(named.size());
        py::handle tensor = item;
        if (py::isinstance<py::tuple>(item) && py::len(item) == 2 && PyUnicode_Check(PyTuple_GET_ITEM(item.ptr(), 0))) {
            name = py::handle(PyTuple_GET_ITEM(item.ptr(), 0)).cast<std::string>();
            tensor = PyTuple_GET_ITEM(item.ptr(), 1);
        }
        if (!THPVariable_Check(tensor.ptr()))
            throw py::type_error(face + ": item " + std::to_string(named.size()) + " of the list holds a " + type_of(tensor) +
                                 "; pass parameters, or pairs (name, parameter)" +
                                 (py::isinstance<py::dict>(item) ? ": group['params'] of an optimizer's group" : ""));
        if (!place_of.emplace(name, named.size()).second)
            throw py::value_error(face + ": two parameters are called '" + name + "'; give each a name of its own");
        named.emplace_back(name, THPVariable_Unpack(tensor.ptr()));
        const auto [first, is_new] = name_of.emplace(named.back().second.unsafeGetTensorImpl(), name);
        if (!is_new) throw py::value_error(face + ": parameter '" + name + "' is the same tensor as '" + first->second + "'; list it once");
    }
    if (named.empty()) throw py::value_error(face + ": there are no parameters; instead of a generator that was read before, pass a list");
    return {named, module ? py::list(trained.attr("buffers")()).cast<std::vector<at::Tensor>>() : std::vector<at::Tensor>()};
}

template <class Face, class... More>
std::shared_ptr<Face> make(const char* face, const Comm& comm, const py::object& trained, const More&... more) {
    const gs::TorchParameters parameters = parameters_of(trained, face);
    const py::gil_scoped_release unlocked;
    return std::make_shared<Face>(comm, parameters, more...);
}

/// Invalid input is a ValueError; other errors of the library are RuntimeErrors.
void translate(std::exception_ptr thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (const gs::Error& error) {
        PyErr_SetString(error.errc() == gs::Errc::invalid_argument ? PyExc_ValueError : PyExc_RuntimeError, error.what());
    }
}

/// Python's hooks run before and after the forward of each unit. They do nothing once `sharded` is gone.
void hook(const std::shared_ptr<FullyShard>& sharded, const py::object& module, const std::vector<std::string>& units) {
    for (std::size_t k = 0; k < units.size(); ++k) {
        const py::object unit = module.attr("get_submodule")(units[k]);
        unit.attr("register_forward_pre_hook")(py::cpp_function([weak = std::weak_ptr(sharded), k](const py::args&) {
            const auto live = weak.lock();
            const py::gil_scoped_release unlocked;
            if (live) live->enter(k);
        }));
        unit.attr("register_forward_hook")(py::cpp_function([weak = std::weak_ptr(sharded), k](py::object, py::object, py::object result) {
            const auto live = weak.lock();
            const auto leave = [&](py::handle h) { return py::cast(live->leave(k, h.cast<at::Tensor>())); };
            if (!live) return result;
            if (!py::isinstance<py::tuple>(result)) return py::object(leave(result));
            py::list results;
            for (const py::handle h : result) results.append(THPVariable_Check(h.ptr()) ? leave(h) : py::reinterpret_borrow<py::object>(h));
            return py::object(py::tuple(results));
        }));
    }
}

template <class Sharded, class Class>
void define_sharding(Class& face) {
    face.def("finish", &Sharded::finish, Unlocked(), "Reduces the gradients: shards()[i].grad is then this rank's slice of the average.")
        .def(
            "clip_grad_norm_", [](Sharded& s, double most) { return s.clip_gradients_by_norm(most); }, Unlocked(),
            "Returns the norm before.")
        .def("stepped", &Sharded::stepped, Unlocked(), "Call it when an optimizer has stepped shards(): all ranks get the weights.")
        .def(
            "shards", [](const Sharded& s) { return s.shards(); },
            "This rank's slices of the parameters, flat, in f32, as long as this object lives: for optimizers that work element by element.")
        .def(
            "broadcast_buffers", [](Sharded& s) { s.broadcast_buffers(); }, Unlocked())
        .def("state_dict", &Sharded::state_dict, py::arg("root") = py::none(), Unlocked(), "Whole master weights by name, on all ranks.")
        .def("load_state_dict", &Sharded::load_state_dict, py::arg("state"), py::arg("root") = 0, Unlocked())
        .def("memory", [](const Sharded& s) {
            const gs::ShardMemory m = s.memory();
            return py::dict(py::arg("parameters") = m.parameters, py::arg("gradients") = m.gradients,
                            py::arg("master_weights") = m.master_weights);
        });
}

}  // namespace

PYBIND11_MODULE(gradsync_torch, m) {
    py::module_::import("torch");
    py::register_local_exception_translator(&translate);
    py::class_<Comm>(m, "Comm")
        .def(py::init(&make_comm), "The ranks that the launcher started, or those of torch.distributed. Without either: one rank.")
        .def("duplicate", &Comm::duplicate, Unlocked(), "The same ranks, for another object that lives at the same time. Collective.")
        .def_property_readonly("rank", [](const Comm& c) { return c.rank(); })
        .def_property_readonly("size", [](const Comm& c) { return c.size(); })
        .def(
            "barrier", [](Comm& c) { c.barrier().wait(); }, Unlocked());

    py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
        .def(py::init([](const Comm& comm, const py::object& trained) { return make<Reducer>("Reducer", comm, trained); }), py::arg("comm"),
             py::arg("parameters"), "Of a module, or of a list of parameters or of pairs (name, parameter).")
        .def(
            "broadcast_parameters", [](Reducer& r) { r.broadcast_parameters(); }, Unlocked(), "Every rank gets rank 0's.")
        .def(
            "broadcast_buffers", [](Reducer& r) { r.broadcast_buffers(); }, Unlocked())
        .def("average_buffers", &Reducer::average_buffers, Unlocked(), "Call it before an evaluation or a checkpoint.")
        .def("finish", &Reducer::finish, Unlocked(), "Averages the gradients over the ranks. Call it after backward().")
        .def(
            "clip_grad_norm_", [](Reducer& r, double most) { return r.clip_gradients_by_norm(most); }, Unlocked());

    py::class_<ShardedOptimizer, std::shared_ptr<ShardedOptimizer>> optimizer(m, "ShardedOptimizer");
    optimizer.def(py::init([](const Comm& comm, const py::object& trained) {
                      return make<ShardedOptimizer>("ShardedOptimizer", comm, trained, gs::ExternalOptimizer{});
                  }),
                  py::arg("comm"), py::arg("parameters"), "Of a module, or of a list of parameters or of pairs (name, parameter).");
    define_sharding<ShardedOptimizer>(optimizer);

    py::class_<FullyShard, std::shared_ptr<FullyShard>> fully(m, "FullyShard");
    fully.def(py::init([](const Comm& comm, const py::object& module, const std::vector<std::string>& units) {
                  if (!py::hasattr(module, "get_submodule")) throw py::type_error("FullyShard: pass a module, not a " + type_of(module));
                  auto sharded = make<FullyShard>("FullyShard", comm, module, gs::ExternalOptimizer{}, units);
                  hook(sharded, module, units);
                  return sharded;
              }),
              py::arg("comm"), py::arg("module"), py::arg("units"), "`units` are the names of submodules.");
    define_sharding<FullyShard>(fully);
}
