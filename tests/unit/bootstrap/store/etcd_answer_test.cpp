// SPDX-License-Identifier: BSL-1.0
#include <gradsync/bootstrap/store/etcd_answer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <random>
#include <string>

using namespace gradsync::etcd;

TEST_CASE("base64: what is written is read, and all else is refused") {
    CHECK(to_base64("") == "");
    CHECK(to_base64("f") == "Zg==");
    CHECK(to_base64("fo") == "Zm8=");
    CHECK(to_base64("foo") == "Zm9v");
    CHECK(to_base64("\xff\xfe\xfd") == "//79");
    std::mt19937 random(1);
    for (std::size_t length = 0; length < 100; ++length) {
        std::string bytes(length, ' ');
        for (char& c : bytes) c = static_cast<char>(random());
        CHECK(from_base64(to_base64(bytes)) == bytes);
    }
    for (const char* const bad : {"Z", "Zg", "Zg=", "Zg=a", "=Zg=", "====", "Z===", "Zm9v\n", "Zm 9", "Zm9-", "Z\xc3\xa4v"}) {
        CAPTURE(bad);
        CHECK(!from_base64(bad));
    }
}

TEST_CASE("AnswerReader: what etcd 3.4 says") {
    const auto put = AnswerReader(R"({"header":{"cluster_id":"14841639068965178418","member_id":"10276657743932975437","revision":"2",)"
                                  R"("raft_term":"2"},"succeeded":true,"responses":[{"response_put":{"header":{"revision":"2"}}}]})")
                         .read();
    REQUIRE(put);
    CHECK(put->succeeded);
    CHECK(put->entries.empty());
    const auto found = AnswerReader(R"({"header":{"revision":"2"},"responses":[{"response_range":{"header":{"revision":"2"},"kvs":)"
                                    R"([{"key":"L2EveA==","create_revision":"2","mod_revision":"2","version":"1","value":"aGVsbG8="},)"
                                    R"( { "value" : "" , "key" : "L2EveQ==" } ],"count":"2"}}]})")
                           .read();
    REQUIRE(found);
    CHECK(!found->succeeded);
    REQUIRE(found->entries.size() == 2);
    CHECK(found->entries[0].key == "/a/x");
    CHECK(found->entries[0].value == "hello");
    CHECK(found->entries[1].key == "/a/y");
    CHECK(found->entries[1].value.empty());
    const auto refusal = AnswerReader(R"({"error":"etcdserver: \"x\" \u00e4","message":"m","code":16} )").read();
    REQUIRE(refusal);
    CHECK(refusal->error == "etcdserver: \"x\" ?");
    CHECK(AnswerReader(R"({"token":"sntoKVxAcFdZPIXY.10"})").read()->token == "sntoKVxAcFdZPIXY.10");
}

TEST_CASE("AnswerReader: what is no JSON, or no base64, is nothing") {
    const std::string good = R"({"succeeded":true,"kvs":[{"key":"L2EveA==","value":"aGVsbG8=","n":-1.5e3,"z":null,"a":[]}],"e":"\n"})";
    REQUIRE(AnswerReader(good).read());
    for (std::size_t length = 0; length < good.size(); ++length) CHECK(!AnswerReader(std::string_view(good).substr(0, length)).read());
    for (const char* const bad : {"x", "{}}", "{\"a\"}", "{\"a\":}", "{a:1}", "[1,]", "{\"a\":1,}", "\"\x01\"", "\"\\q\"", "\"\\u12\"",
                                  "nul", R"({"kvs":[{"key":"L2E"}]})", R"({"kvs":[{"value":"L2E*"}]})", "<html>", "{\"a\":1]", "[1}"}) {
        CAPTURE(bad);
        CHECK(!AnswerReader(bad).read());
    }
    CHECK(!AnswerReader(std::string(100'000, '[')).read());
}
