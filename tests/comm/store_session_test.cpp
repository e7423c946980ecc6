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

TEST(Handshake, ADamagedByteOfAChallengeIsNoOtherProtocol) {
  auto challenge = make_challenge({7, true});
  challenge[3] ^= 4;
  EXPECT_TRUE(begins_challenge(challenge));
  EXPECT_FALSE(read_challenge(challenge));
  challenge[4] ^= 4;
  EXPECT_FALSE(begins_challenge(challenge));
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
  const auto message = [](const std::string& body) {
    std::string bytes;
    append_number(bytes, static_cast<uint32_t>(body.size()));
    append_number(bytes, ~static_cast<uint32_t>(body.size()));
    bytes += body;
    seal(bytes);
    return bytes;
  };
  EXPECT_EQ(taken(message("\1\0\0\0\1x"s)), Taken::whole);
  EXPECT_EQ(taken("\xff\xff\xff\xff\0\0\0\0"s), Taken::malformed) << "4 GiB are announced";
  EXPECT_EQ(taken("\x04\0\0\1\xfb\xff\xff\xfe"s), Taken::malformed) << "a byte more than the most";
  EXPECT_EQ(taken("\0\0\0\1\xff\xff\xff\xff"s), Taken::malformed) << "another complement";
  EXPECT_EQ(taken(message("")), Taken::malformed) << "no code";
  EXPECT_EQ(taken(message("\1\0\0"s)), Taken::malformed) << "a part without its size";
  EXPECT_EQ(taken(message("\1\0\0\0\2x"s)), Taken::malformed) << "a part larger than the message";
  EXPECT_EQ(taken(message("\1\xff\xff\xff\xffx"s)), Taken::malformed);
}

TEST(StoreMessages, OneBitThatIsWrongIsFound) {
  const auto bytes = encode({3, {"key", std::string(200, 'v')}});
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    auto changed = bytes;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    StoreMessage message;
    ASSERT_EQ(take_message(changed, message), Taken::malformed) << bit;
  }
}

TEST(StoreHandshake, ProvesTheSecretInBothDirectionsAndOnlyOnce) {
  const auto hello = make_hello({2, 7, true, 3});
  const auto challenge = make_challenge({7, true, 4});
  ASSERT_EQ(hello.size(), kHelloBytes);
  ASSERT_EQ(challenge.size(), kChallengeBytes);
  EXPECT_EQ(read_hello(hello)->rank, 2);
  EXPECT_EQ(read_hello(hello)->attempt, 7);
  EXPECT_EQ(read_hello(hello)->world, 3);
  EXPECT_TRUE(read_hello(hello)->has_secret);
  EXPECT_EQ(read_challenge(challenge)->attempt, 7);
  EXPECT_EQ(read_challenge(challenge)->world, 4);
  EXPECT_TRUE(read_challenge(challenge)->has_secret);
  const auto verdict = make_verdict(kWelcome, true, "secret", hello, challenge);
  ASSERT_EQ(verdict.size(), kVerdictBytes);
  EXPECT_TRUE(store_proves("secret", hello, challenge, verdict));
  EXPECT_FALSE(store_proves("other", hello, challenge, verdict));
  EXPECT_FALSE(store_proves("", hello, challenge, verdict));
  EXPECT_FALSE(store_proves("secret", make_hello({2, 7, true}), challenge, verdict)) << "a replay";
  EXPECT_FALSE(store_proves("secret", hello, challenge,
                            make_verdict(kWelcome, false, "secret", hello, challenge)));

  const auto proof = make_proof("secret", hello, challenge);
  ASSERT_EQ(proof.size(), kProofBytes);
  EXPECT_TRUE(rank_proves("secret", hello, challenge, proof));
  EXPECT_FALSE(rank_proves("other", hello, challenge, proof));
  const auto another = make_challenge({7, true});
  EXPECT_NE(another, challenge);
  EXPECT_FALSE(rank_proves("secret", hello, another, proof)) << "a replay";
  auto reflected = verdict.substr(1, 32);
  seal(reflected);
  ASSERT_EQ(reflected.size(), kProofBytes);
  EXPECT_FALSE(rank_proves("secret", hello, challenge, reflected))
      << "the store's own proof is none of a rank";
  EXPECT_FALSE(rank_proves("secret", hello, challenge, make_no_proof()));
  EXPECT_TRUE(
      store_proves("", hello, challenge, make_verdict(kWelcome, true, "", hello, challenge)));
}

TEST(StoreHandshake, EveryByteCounts) {
  const auto hello = make_hello({2, 7, true});
  const auto challenge = make_challenge({7, true});
  const auto verdict = make_verdict(kWelcome, true, "secret", hello, challenge);
  const auto proof = make_proof("secret", hello, challenge);
  const auto at_each_byte = [](const std::string& bytes, const auto& check) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      auto changed = bytes;
      changed[i] ^= 1;
      EXPECT_FALSE(is_sealed(changed)) << i << ": damage is noticed";
      changed.resize(bytes.size() - kSealBytes);
      seal(changed);
      if (i < bytes.size() - kSealBytes) check(changed, i);
    }
  };
  at_each_byte(hello, [&](const std::string& changed, size_t i) {
    EXPECT_FALSE(store_proves("secret", changed, challenge, verdict)) << i;
    EXPECT_FALSE(rank_proves("secret", changed, challenge, proof)) << i;
  });
  at_each_byte(challenge, [&](const std::string& changed, size_t i) {
    EXPECT_FALSE(store_proves("secret", hello, changed, verdict)) << i;
    EXPECT_FALSE(rank_proves("secret", hello, changed, proof)) << i;
  });
  at_each_byte(proof, [&](const std::string& changed, size_t i) {
    EXPECT_FALSE(rank_proves("secret", hello, challenge, changed)) << i;
  });
}

class StoreSession : public ::testing::Test {
 protected:
  const Session::Gate gate{7, "secret"};
  KeyTable table;

  /// A session after the hello of a rank of `attempt`, and the proof that it is sent.
  void greet(Session& session, int attempt, const std::string& secret, int world = 0) {
    hello = make_hello({3, attempt, !secret.empty(), world});
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
  session.feed(proof.substr(0, 5));
  EXPECT_EQ(session.output(), "");
  session.feed(proof.substr(5));
  EXPECT_EQ(session.output()[0], kWelcome);
  EXPECT_TRUE(store_proves("secret", hello, challenge, session.output()));
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
    EXPECT_EQ(session.output()[0], kRefusal);
    EXPECT_THAT(session.complaint(), HasSubstr("it calls itself rank 3 and "));
    return session.complaint();
  };
  EXPECT_THAT(complaint(gate, 7, "other"), HasSubstr("another secret than rank 0; set the same "
                                                     "TESSERA_SECRET or TESSERA_SECRET_FILE"));
  EXPECT_THAT(complaint(gate, 7, ""), HasSubstr("has no secret, and rank 0 has one"));
  EXPECT_THAT(complaint({7, ""}, 7, "x"), HasSubstr("has a secret, and rank 0 has none"));
  EXPECT_THAT(complaint(gate, 6, "secret"), HasSubstr("belongs to attempt 6; expected attempt 7"));
}

TEST_F(StoreSession, RefusesARankOfAnotherWorldAndProvesTheSecretToIt) {
  const Session::Gate second{7, "secret", "rank", 1};
  for (const int world : {0, 2}) {
    Session session(second, table);
    greet(session, 7, "secret", world);
    session.feed(proof);
    EXPECT_TRUE(session.dropped()) << world;
    EXPECT_EQ(session.output()[0], kRefusal);
    EXPECT_TRUE(store_proves("secret", hello, challenge, session.output()));
    EXPECT_EQ(
        session.complaint(),
        world == 0 ? "it calls itself rank 3 and makes its world number 1; expected number 2" : "")
        << "a rank of the next world is early, which is no fault";
  }
}

TEST_F(StoreSession, TellsAStrangerNothingThatDependsOnTheSecret) {
  Session session(gate, table);
  const auto own = make_hello({3, 7, true});
  session.feed(own);
  const auto asked = session.output();
  ASSERT_EQ(asked.size(), kChallengeBytes);
  // Mark, attempt, world and flag are known, and the nonce is fresh: nothing to try words against.
  EXPECT_EQ(asked.substr(0, 17), make_challenge({7, true}).substr(0, 17));
  session.output().clear();
  session.feed(make_proof("a word that is tried", own, asked));
  EXPECT_EQ(session.output(), make_verdict(kRefusal, false, "any other secret", "", ""));
}

TEST_F(StoreSession, TakesNoDamagedHelloOrProofForAnotherSecret) {
  for (const bool in_proof : {false, true}) {
    Session session(gate, table);
    if (in_proof) greet(session, 7, "secret");
    auto damaged = in_proof ? proof : make_hello({3, 7, true});
    damaged[20] ^= 1;
    session.feed(damaged);
    EXPECT_TRUE(session.dropped());
    EXPECT_EQ(session.output(), "") << "the rank tries again";
    EXPECT_EQ(session.complaint(), "");
  }
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
  for (const auto& junk : {"\0"s, "GET / HTTP/1.1\r\n\r\n"s, "SSH-2.0-x\r\n"s, "tesser2<"s,
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
       {std::string("\xff\xff\xff\xff\1\1\1\1"), encode(request(Request::wait, {"k"})) + "more"}) {
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
