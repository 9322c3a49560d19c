// ctest: MPI RANKS 2 4
// A program of n ranks runs the suite at 1 to n.
#include "conformance/backend.hpp"
#include "conformance/mpi_launcher.hpp"

using gradsync_test::MpiProcesses;

TEST_CASE("MpiBackend: results") { gradsync_test::check_results<MpiProcesses>(); }
TEST_CASE("MpiBackend: collectives in flight") { gradsync_test::check_in_flight<MpiProcesses>(); }
TEST_CASE("MpiBackend: groups") { gradsync_test::check_groups<MpiProcesses>(); }
TEST_CASE("MpiBackend: failures") { gradsync_test::check_failures<MpiProcesses>(); }
