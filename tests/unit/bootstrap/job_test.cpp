// SPDX-License-Identifier: BSL-1.0
#include <gradsync/bootstrap/job.hpp>

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <utility>

#include "support/says.hpp"

using gradsync::Job;
using gradsync_test::says;

namespace {

Job job_of(const std::map<std::string, std::string>& variables) {
    return Job::from([&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    });
}

std::string refusal_of(const std::map<std::string, std::string>& variables) {
    try {
        job_of(variables);
        return "nothing was thrown";
    } catch (const gradsync::Error& error) {
        return error.errc() == gradsync::Errc::invalid_argument ? error.what() : "another code";
    }
}

}  // namespace

TEST_CASE("Job has one rank without a launcher") {
    const Job job = job_of({});
    CHECK(job.rank == 0);
    CHECK(job.size == 1);
}

TEST_CASE("Job reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK") {
    const Job job = job_of({{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"MASTER_ADDR", "fe80::1"},
                            {"MASTER_PORT", "1234"},
                            {"LOCAL_RANK", "1"},
                            {"GRADSYNC_JOB_TOKEN", "secret"},
                            {"SLURM_PROCID", "7"},
                            {"SLURM_NTASKS", "9"}});
    CHECK(job.rank == 5);
    CHECK(job.size == 8);
    CHECK(job.local_rank == 1);
    CHECK(job.address == "fe80::1");
    CHECK(job.port == 1234);
    CHECK(job.token == "secret");
    CHECK(job.run_id.empty());
    CHECK(job_of({{"RANK", "3"}, {"WORLD_SIZE", "4"}}).local_rank == 3);
}

TEST_CASE("job: a name is no loopback address, whatever its first digits are") {
    for (const char* const own : {"localhost", "::1", "127.0.0.1", "127.1", "127.255.255.254"}) CHECK(Job{.address = own}.is_at_loopback());
    for (const char* const other : {"127.cluster.example", "127.0.0.1.example", "127", "128.0.0.1", "::2", "", "localhost.example"})
        CHECK_FALSE(Job{.address = other}.is_at_loopback());
}

TEST_CASE("job: torchrun's agent has MASTER_PORT for itself") {
    std::map<std::string, std::string> torchrun = {{"RANK", "1"},
                                                   {"WORLD_SIZE", "2"},
                                                   {"MASTER_ADDR", "host"},
                                                   {"MASTER_PORT", "29500"},
                                                   {"LOCAL_RANK", "1"},
                                                   {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                   {"TORCHELASTIC_RUN_ID", "run7"},
                                                   {"TORCHELASTIC_RESTART_COUNT", "0"}};
    CHECK(job_of(torchrun).port == 29501);
    CHECK(job_of(torchrun).run_id == "torchrun run7 0");
    torchrun["TORCHELASTIC_RESTART_COUNT"] = "1";  // who is left of the run before is turned away
    CHECK(job_of(torchrun).run_id == "torchrun run7 1");
    torchrun["GRADSYNC_JOB_TOKEN"] = "secret";
    CHECK(job_of(torchrun).token == "secret");
    CHECK(job_of(torchrun).run_id == "torchrun run7 1");
    torchrun["MASTER_PORT"] = "65535";
    CHECK(job_of(torchrun).port == 1024);
    torchrun["GRADSYNC_PORT"] = "4000";
    CHECK(job_of(torchrun).port == 4000);
    torchrun.erase("GRADSYNC_PORT");
    torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "False";  // rank 0 is to listen
    CHECK(job_of(torchrun).port == 65535);
}

TEST_CASE("Job reads Slurm's variables, and ours override them") {
    const std::map<std::string, std::string> slurm = {{"SLURM_PROCID", "3"},      {"SLURM_NTASKS", "4"},
                                                      {"SLURM_LOCALID", "1"},     {"SLURM_JOB_NODELIST", "gpu-[03-07,09],login1"},
                                                      {"SLURM_JOB_ID", "123456"}, {"SLURM_STEP_ID", "2"}};
    const Job job = job_of(slurm);
    CHECK(job.rank == 3);
    CHECK(job.size == 4);
    CHECK(job.local_rank == 1);
    CHECK(job.address == "gpu-03");
    CHECK(job.port == 20000 + 123456 % 20000);
    CHECK(job.token.empty());  // whoever can guess the number is no member
    CHECK(job.run_id == "slurm 123456.2");

    auto step = slurm;
    step["SLURM_STEP_NODELIST"] = "gpu-05";
    CHECK(job_of(step).address == "gpu-05");
    step["MASTER_ADDR"] = "10.0.0.1";
    step["MASTER_PORT"] = "4000";
    step["GRADSYNC_JOB_TOKEN"] = "mine";
    CHECK(job_of(step).address == "10.0.0.1");
    CHECK(job_of(step).port == 4000);
    CHECK(job_of(step).token == "mine");
}

TEST_CASE("Job reads what mpirun sets, also inside a job of Slurm's") {
    std::map<std::string, std::string> open_mpi = {
        {"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"PMIX_NAMESPACE", "77"}};
    Job job = job_of(open_mpi);
    CHECK(job.rank == 2);
    CHECK(job.size == 4);
    CHECK(job.local_rank == 1);
    CHECK(job.address == "localhost");
    CHECK(job.run_id == "mpirun 77");
    // Of a batch script that calls mpirun: on its own machine, and on the other one, where a step of mpirun's has begun.
    auto elsewhere = open_mpi;
    for (const auto& [name, value] : {std::pair{"SLURM_JOB_NODELIST", "node[1-2]"}, {"SLURM_JOB_ID", "9"}})
        open_mpi[name] = elsewhere[name] = value;
    for (const auto& [name, value] : {std::pair{"SLURM_PROCID", "0"},
                                      {"SLURM_NTASKS", "1"},
                                      {"SLURM_LOCALID", "0"},
                                      {"SLURM_STEP_NODELIST", "node2"},
                                      {"SLURM_STEP_ID", "0"}})
        elsewhere[name] = value;
    for (const auto& variables : {open_mpi, elsewhere}) {
        job = job_of(variables);
        CHECK(job.rank == 2);
        CHECK(job.size == 4);
        CHECK(job.local_rank == 1);
        CHECK(job.address == "node1");
        CHECK(job.port == 20009);
        CHECK(job.run_id == "slurm 9, mpirun 77");
    }
    open_mpi["MASTER_ADDR"] = "node2";
    CHECK(job_of(open_mpi).address == "node2");
    open_mpi["RANK"] = "0";
    open_mpi["WORLD_SIZE"] = "2";
    CHECK(job_of(open_mpi).size == 2);
    CHECK(job_of(open_mpi).run_id.empty());

    job = job_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "0"}});
    CHECK(job.rank == 1);
    CHECK(job.size == 3);
    CHECK(job.local_rank == 0);
    CHECK(says(refusal_of({{"OMPI_COMM_WORLD_RANK", "1"}}), "OMPI_COMM_WORLD_SIZE is not set"));
    // srun --mpi=pmi2 sets a part of it.
    CHECK(job_of({{"PMI_RANK", "6"}, {"PMI_SIZE", "8"}, {"SLURM_PROCID", "6"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "3"}}).local_rank ==
          3);
}

TEST_CASE("Job finds the first host of Slurm's lists") {
    using gradsync::bootstrap::first_host;
    CHECK(first_host("node1") == "node1");
    CHECK(first_host("node1,node2") == "node1");
    CHECK(first_host("node[1-4]") == "node1");
    CHECK(first_host("node[007,009]") == "node007");
    CHECK(first_host("a1,b[2-3]") == "a1");
    CHECK(first_host("rack[2-3]-gpu,x") == "rack2-gpu");
    CHECK(first_host("node[") == "");
    CHECK(first_host("node[1-4") == "");
}

TEST_CASE("Job names a variable that is missing or is no number") {
    CHECK(says(refusal_of({{"RANK", "1"}}), "WORLD_SIZE is not set"));
    CHECK(says(refusal_of({{"WORLD_SIZE", "2"}}), "RANK is not set"));
    CHECK(says(refusal_of({{"RANK", ""}, {"WORLD_SIZE", "2"}}), "RANK is not set"));
    CHECK(says(refusal_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "RANK must be a number from 0 to 1, not '2'"));
    CHECK(says(refusal_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), "not '-1'"));
    CHECK(says(refusal_of({{"RANK", "0"}, {"WORLD_SIZE", "two"}}), "not 'two'"));
    CHECK(says(refusal_of({{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}), "WORLD_SIZE must be"));
    const auto second_of_two = [](const char* name, const char* value) {
        return std::map<std::string, std::string>{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {name, value}};
    };
    CHECK(says(refusal_of(second_of_two("MASTER_PORT", "70000")), "MASTER_PORT must be a number from 1 to 65535"));
    CHECK(job_of(second_of_two("MASTER_ADDR", "[fe80::1]")).address == "fe80::1");
    CHECK(says(refusal_of(second_of_two("MASTER_ADDR", "[fe80::1]:29500")), "a host without a port, not '[fe80::1]:29500'"));
    CHECK(says(refusal_of(second_of_two("MASTER_ADDR", "node1:29500")),
               "a host without a port, not 'node1:29500'; put the port into MASTER_PORT"));
    CHECK(says(refusal_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NODELIST", "n["}}), "set MASTER_ADDR"));
    CHECK(says(refusal_of({{"SLURM_PROCID", "0"}}), "start the program with srun"));
}

TEST_CASE("job: an address or a port without a rank is refused, and is not a job of one rank") {
    using Variables = std::map<std::string, std::string>;
    for (const Variables& alone : {Variables{{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}}, Variables{{"MASTER_ADDR", "node1"}},
                                   Variables{{"MASTER_PORT", "29500"}}})
        CHECK(says(refusal_of(alone), "MASTER_ADDR or MASTER_PORT is set, but RANK and WORLD_SIZE are not; set all four on every rank"));
    CHECK(job_of({{"MASTER_PORT", ""}}).size == 1);  // as if it were not set
    // A launcher says the rank, and has a default for the other one.
    CHECK(job_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "4000"}}).port == 4000);
    CHECK(job_of({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "node1"}}).address == "node1");
}
