#include "tessera/detail/report_to_launcher.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>

#include <gmock/gmock.h>
#include <sys/resource.h>

#include "tessera/detail/rank_report.h"
#include "tessera/step/agreement.h"

namespace {

using tessera::detail::RankReport;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Report : public ::testing::Test {
 protected:
  Report() {
    char name[] = "/tmp/tessera-report-test-XXXXXX";
    folder_ = mkdtemp(name);
    setenv("TESSERA_REPORT", path().c_str(), 1);
  }
  ~Report() override {
    tessera::detail::withdraw_report();
    unsetenv("TESSERA_REPORT");
    std::filesystem::remove_all(folder_);
  }
  std::string path() const { return folder_ + "/report.2"; }
  std::optional<RankReport> read() const {
    std::ifstream file(path(), std::ios::binary);
    return RankReport::from_text({std::istreambuf_iterator<char>(file), {}});
  }

 private:
  std::string folder_;
};

TEST_F(Report, IsWrittenReplacedAndWithdrawn) {
  tessera::detail::report_agreed({1, 3}, "no such file");
  ASSERT_TRUE(read());
  EXPECT_EQ(read()->kind, RankReport::Kind::agreed);
  EXPECT_THAT(read()->ranks, ElementsAre(1, 3));
  EXPECT_EQ(read()->text, "no such file");
  tessera::detail::report_broken({0}, "gone");
  EXPECT_EQ(read()->kind, RankReport::Kind::broken);
  tessera::detail::withdraw_report();
  EXPECT_FALSE(std::filesystem::exists(path()));
  tessera::detail::report_stop(15, {});
  EXPECT_EQ(read()->signal, 15);
  EXPECT_THAT(read()->ranks, IsEmpty());
}

TEST_F(Report, WithoutRanksNothingIsReported) {
  tessera::detail::report_agreed({}, "x");
  tessera::detail::report_broken({}, "x");
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(Report, AFolderThatIsGoneIsNoError) {
  std::filesystem::remove_all(std::filesystem::path(path()).parent_path());
  tessera::detail::report_agreed({1}, "x");
}

TEST(Minority, NamesTheRanksThatDifferFromMoreThanHalf) {
  const auto of = [](const std::vector<int>& values) {
    return tessera::detail::minority(static_cast<int>(values.size()),
                                     [&](int a, int b) { return values[a] == values[b]; });
  };
  EXPECT_THAT(of({7, 7, 8}), ElementsAre(2));
  EXPECT_THAT(of({8, 7, 7, 9, 7}), ElementsAre(0, 3));
  EXPECT_THAT(of({7, 8}), IsEmpty());
  EXPECT_THAT(of({7, 7, 8, 8}), IsEmpty());
  EXPECT_THAT(of({7, 7}), IsEmpty());
}

TEST(MessageOf, AnErrorOfAnAllocationNamesTheLimit) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  auto smaller = limit;
  smaller.rlim_cur = rlim_t{1} << 40;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &smaller), 0);
  const auto text = tessera::message_of(std::bad_alloc());
  setrlimit(RLIMIT_AS, &limit);
  EXPECT_THAT(text, ::testing::MatchesRegex(
                        "out of memory \\(RLIMIT_AS 1048576 MiB; peak [0-9]+ MiB\\): .*bad_alloc"));
  EXPECT_EQ(tessera::message_of(std::runtime_error("another error")), "another error");
}

}  // namespace
