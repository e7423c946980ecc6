// The parts of the store without sockets: handshake, messages, keys, one peer's session.
#include <limits>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/store/addresses.h"
#include "comm/store/session.h"
#include "tessera/error.h"

namespace {

using namespace tessera::comm;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

StoreMessage request(Request kind, std::vector<std::string> parts) {
  return {static_cast<uint8_t>(kind), std::move(parts)};
}

/// What the table answers: its part, or "-" if there is none, "waits", "refused: reason".
std::string answer(KeyTable& table, Request kind, std::vector<std::string> parts) {
  const auto reply = table.answer(request(kind, std::move(parts)));
  if (!reply) return "waits";
  const auto part = reply->parts.empty() ? "-" : reply->parts[0];
  return static_cast<Reply>(reply->code) == Reply::done ? part : "refused: " + part;
}

TEST(StoreKeyTable, DoesWhatTheFunctionsOfAStoreDo) {
  KeyTable table;
  EXPECT_EQ(answer(table, Request::get, {"a"}), "waits");
  EXPECT_EQ(answer(table, Request::check, {"a"}), "0");
  EXPECT_EQ(answer(table, Request::set, {"a", "x"}), "-");
  EXPECT_EQ(answer(table, Request::get, {"a"}), "x");
  EXPECT_EQ(answer(table, Request::check, {"a"}), "1");
  EXPECT_EQ(answer(table, Request::check, {"a", "b"}), "0");
  EXPECT_EQ(answer(table, Request::wait, {"a", "b"}), "waits");
  EXPECT_EQ(answer(table, Request::add, {"b", "5"}), "5");
  EXPECT_EQ(answer(table, Request::add, {"b", "-7"}), "-2");
  EXPECT_EQ(answer(table, Request::wait, {"a", "b"}), "-");
  EXPECT_EQ(answer(table, Request::count_keys, {}), "2");
  EXPECT_EQ(answer(table, Request::delete_key, {"a"}), "1");
  EXPECT_EQ(answer(table, Request::delete_key, {"a"}), "0");
  EXPECT_EQ(answer(table, Request::count_keys, {}), "1");
}

TEST(StoreKeyTable, CompareSetSetsOnlyWhatIsExpected) {
  KeyTable table;
  EXPECT_EQ(answer(table, Request::compare_set, {"k", "old", "new"}), "old") << "there is no key";
  EXPECT_EQ(answer(table, Request::check, {"k"}), "0");
  EXPECT_EQ(answer(table, Request::compare_set, {"k", "", "first"}), "first");
  EXPECT_EQ(answer(table, Request::compare_set, {"k", "other", "second"}), "first");
  EXPECT_EQ(answer(table, Request::compare_set, {"k", "first", "second"}), "second");
  EXPECT_EQ(answer(table, Request::get, {"k"}), "second");
}

TEST(StoreKeyTable, RefusesRequestsThatMakeNoSense) {
  KeyTable table;
  EXPECT_THAT(answer(table, Request::set, {"a"}), HasSubstr("refused: a request with a wrong"));
  EXPECT_THAT(answer(table, Request::get, {}), HasSubstr("refused: a request with a wrong"));
  EXPECT_THAT(answer(table, Request::compare_set, {"a", "b"}), HasSubstr("refused"));
  EXPECT_THAT(answer(table, static_cast<Request>(0), {}), HasSubstr("refused: an unknown"));
  EXPECT_THAT(answer(table, static_cast<Request>(255), {"a"}), HasSubstr("refused: an unknown"));
  answer(table, Request::set, {"text", "x"});
  EXPECT_THAT(answer(table, Request::add, {"text", "1"}), HasSubstr("refused: add"));
  EXPECT_THAT(answer(table, Request::add, {"n", "1e3"}), HasSubstr("refused: add"));
  const auto most = std::to_string(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(answer(table, Request::add, {"n", most}), most);
  EXPECT_THAT(answer(table, Request::add, {"n", "1"}), HasSubstr("refused: add"));
}

TEST(StoreMessages, ComeBackWholeHoweverTheyAreCut) {
  StoreMessage sent{3, {"key", "", std::string("\0\xff", 2)}}, taken;
  const auto bytes = encode(sent);
  std::string buffer;
  for (size_t i = 0; i + 1 < bytes.size(); ++i) {
    buffer += bytes[i];
    ASSERT_EQ(take_message(buffer, taken), Taken::incomplete);
  }
  buffer += bytes.back();
  ASSERT_EQ(take_message(buffer, taken), Taken::whole);
  EXPECT_EQ(taken.code, 3);
  EXPECT_EQ(taken.parts, sent.parts);
  EXPECT_EQ(buffer, "");
  EXPECT_THROW(encode({1, {std::string(kMaxMessageBytes, 'x')}}), tessera::UsageError);
}

TEST(StoreMessages, WrongSizesAreNoMessages) {
  const auto taken = [](std::string bytes) {
    StoreMessage message;
    return take_message(bytes, message);
  };
  using namespace std::string_literals;
  EXPECT_EQ(taken("\xff\xff\xff\xff"s), Taken::malformed) << "4 GiB are announced";
  EXPECT_EQ(taken("\x04\0\0\1"s), Taken::malformed) << "one byte more than the most";
  EXPECT_EQ(taken("\0\0\0\0"s), Taken::malformed) << "no code";
  EXPECT_EQ(taken("\0\0\0\3\1\0\0"s), Taken::malformed) << "a part without its size";
  EXPECT_EQ(taken("\0\0\0\6\1\0\0\0\2x"s), Taken::malformed) << "a part larger than the message";
  EXPECT_EQ(taken("\0\0\0\6\1\xff\xff\xff\xffx"s), Taken::malformed);
}

TEST(StoreHandshake, ProvesTheSecretInBothDirectionsAndOnlyOnce) {
  const auto hello = make_hello({2, 7, true});
  const auto challenge = make_challenge({7, true}, "secret", hello);
  ASSERT_EQ(hello.size(), kHelloBytes);
  ASSERT_EQ(challenge.size(), kChallengeBytes);
  EXPECT_EQ(read_hello(hello)->rank, 2);
  EXPECT_EQ(read_hello(hello)->attempt, 7);
  EXPECT_EQ(read_challenge(challenge)->attempt, 7);
  EXPECT_TRUE(store_proves("secret", hello, challenge));
  EXPECT_FALSE(store_proves("other", hello, challenge));
  EXPECT_FALSE(store_proves("", hello, challenge));
  EXPECT_FALSE(store_proves("secret", make_hello({2, 7, true}), challenge)) << "a replay";

  const auto proof = make_proof("secret", hello, challenge);
  ASSERT_EQ(proof.size(), kProofBytes);
  EXPECT_TRUE(rank_proves("secret", hello, challenge, proof));
  EXPECT_FALSE(rank_proves("other", hello, challenge, proof));
  const auto another = make_challenge({7, true}, "secret", hello);
  EXPECT_NE(another, challenge);
  EXPECT_FALSE(rank_proves("secret", hello, another, proof)) << "a replay";
  EXPECT_FALSE(rank_proves("secret", hello, challenge, challenge.substr(kChallengeBytes - 32)))
      << "the store's own proof is none of a rank";
  EXPECT_TRUE(store_proves("", hello, make_challenge({7, false}, "", hello)));
}

TEST(StoreHandshake, EveryByteCounts) {
  const auto hello = make_hello({2, 7, true});
  const auto challenge = make_challenge({7, true}, "secret", hello);
  for (size_t i = 0; i < hello.size(); ++i) {
    auto changed = hello;
    changed[i] ^= 1;
    EXPECT_FALSE(store_proves("secret", changed, challenge)) << i;
  }
  for (size_t i = 0; i < challenge.size(); ++i) {
    auto changed = challenge;
    changed[i] ^= 1;
    EXPECT_FALSE(store_proves("secret", hello, changed)) << i;
  }
}

class StoreSession : public ::testing::Test {
 protected:
  const Session::Gate gate{7, "secret"};
  KeyTable table;

  /// A session after the hello of a rank of `attempt`, and the proof that it is sent.
  void greet(Session& session, int attempt, const std::string& secret) {
    hello = make_hello({3, attempt, !secret.empty()});
    session.feed(hello);
    challenge = session.output();
    session.output().clear();
    proof = make_proof(secret, hello, challenge);
  }
  std::string hello, challenge, proof;
};

TEST_F(StoreSession, AnswersARankThatProvesTheSecret) {
  Session session(gate, table);
  greet(session, 7, "secret");
  EXPECT_TRUE(store_proves("secret", hello, challenge));
  session.feed(proof.substr(0, 5));
  EXPECT_EQ(session.output(), "");
  session.feed(proof.substr(5));
  EXPECT_EQ(session.output(), std::string(1, kWelcome));
  EXPECT_TRUE(session.is_member());
  session.output().clear();
  session.feed(encode(request(Request::wait, {"k"})));
  EXPECT_EQ(session.output(), "");
  table.answer(request(Request::set, {"k", "v"}));
  session.answer_waiting();
  EXPECT_EQ(session.output(), encode({static_cast<uint8_t>(Reply::done), {}}));
  EXPECT_FALSE(session.dropped());
}

TEST_F(StoreSession, RefusesAnotherSecretAndAnotherAttempt) {
  const auto complaint = [&](const Session::Gate& of, int attempt, const std::string& secret) {
    Session session(of, table);
    greet(session, attempt, secret);
    session.feed(proof);
    EXPECT_TRUE(session.dropped());
    EXPECT_EQ(session.output(), std::string(1, kRefusal));
    EXPECT_THAT(session.complaint(), HasSubstr("it calls itself rank 3 and "));
    return session.complaint();
  };
  EXPECT_THAT(complaint(gate, 7, "other"), HasSubstr("another secret than rank 0; set the same "
                                                     "TESSERA_SECRET or TESSERA_SECRET_FILE"));
  EXPECT_THAT(complaint(gate, 7, ""), HasSubstr("has no secret, and rank 0 has one"));
  EXPECT_THAT(complaint({7, ""}, 7, "x"), HasSubstr("has a secret, and rank 0 has none"));
  EXPECT_THAT(complaint(gate, 6, "secret"), HasSubstr("belongs to attempt 6; expected attempt 7"));
}

TEST_F(StoreSession, DropsAReplayedProof) {
  Session first(gate, table);
  greet(first, 7, "secret");
  first.feed(proof);
  ASSERT_TRUE(first.is_member());
  Session second(gate, table);
  second.feed(hello);
  second.output().clear();
  second.feed(proof);
  EXPECT_TRUE(second.dropped());
}

TEST_F(StoreSession, DropsJunkAtItsFirstWrongByte) {
  using namespace std::string_literals;
  for (const auto& junk : {"\0"s, "GET / HTTP/1.1\r\n\r\n"s, "SSH-2.0-x\r\n"s, "tessera<"s,
                           make_hello({1, 7, true}) + "x"}) {
    Session session(gate, table);
    session.feed(junk);
    EXPECT_TRUE(session.dropped()) << junk;
    EXPECT_EQ(session.complaint(), "");
  }
  Session half(gate, table);
  half.feed(make_hello({1, 7, true}).substr(0, 20));
  EXPECT_FALSE(half.dropped()) << "the rest may come";
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    Session session(gate, table);
    if (i % 2) greet(session, 7, "secret");
    if (i % 4 == 3) session.feed(proof);
    session.output().clear();
    std::string junk(random() % 100 + 40, '\0');
    for (auto& byte : junk) byte = static_cast<char>(random());
    session.feed(junk);
    EXPECT_TRUE(session.dropped() || i % 4 == 3) << i;
  }
}

TEST_F(StoreSession, DropsAMemberWithAHugeOrAnEarlyRequest) {
  for (const auto& bytes :
       {std::string("\xff\xff\xff\xff\1"), encode(request(Request::wait, {"k"})) + "more"}) {
    Session session(gate, table);
    greet(session, 7, "secret");
    session.feed(proof);
    session.output().clear();
    session.feed(bytes);
    EXPECT_TRUE(session.dropped());
  }
}

TEST(StoreAddresses, ALoopbackNameOfTheHostAddsTheAddressThatOtherHostsSee) {
  EXPECT_THAT(listening_addresses({"192.0.2.1"}, "198.51.100.7"), ElementsAre("192.0.2.1"));
  EXPECT_THAT(listening_addresses({"127.0.1.1"}, "198.51.100.7"),
              ElementsAre("127.0.1.1", "198.51.100.7"));
  EXPECT_THAT(listening_addresses({"::1", "127.0.0.1"}, ""), ElementsAre("::1", "127.0.0.1"));
  EXPECT_THAT(listening_addresses({"127.0.1.1", "192.0.2.1"}, "198.51.100.7"),
              ElementsAre("127.0.1.1", "192.0.2.1"));
}

TEST(StoreAddresses, AnUnknownNameIsAnErrorThatNamesIt) {
  try {
    resolve_master_address("no-such-host.invalid", 3);
    FAIL();
  } catch (const tessera::UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 3: MASTER_ADDR is 'no-such-host.invalid': "));
  }
  EXPECT_THAT(resolve_master_address("127.0.0.1", 0), ElementsAre("127.0.0.1"));
}

}  // namespace
