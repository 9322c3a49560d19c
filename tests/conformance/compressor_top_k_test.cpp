#include <gradsync/compress/top_k.hpp>

#include "conformance/compressor.hpp"

TEST_CASE("TopK is a compressor") {
    using TopK = gradsync::TopK<gradsync::ThreadBackend>;
    gradsync_test::check_compressor(TopK({.density = 0.05}), TopK({.density = 0.05, .start_step = 2}));
}
