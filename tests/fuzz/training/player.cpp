#include "fuzz/training/player.h"

#include <cmath>
#include <utility>

#include "fuzz/training/plain/training.h"
#include "fuzz/training/story.h"
#include "tessera/memory/deferred_init.h"

namespace tessera::fuzz {

Player::Player(const Case& which, const Segment& segment, ProcessGroup group,
               const Carried& carried, std::string scratch)
    : which_(which),
      wrapper_(segment.wrapper),
      group_(std::move(group)),
      inner_(group_),
      carried_(carried),
      scratch_(std::move(scratch)),
      scaler_({.init_scale = 256, .growth_interval = 2}) {
  const bool loads = segment.begin < segment.end && which.story[segment.begin].kind == "move";
  // Ranks begin with different weights where the wrapper broadcasts rank 0's.
  const bool broadcasts = !wrapper_.has("late_part") && !wrapper_.flag("no_broadcast") &&
                          wrapper_.number("bcast_period", 0) >= 0;
  const int groups = groups_apart(wrapper_);
  if (groups > 1) {
    apart_.emplace(local_sgd_groups(group_, group_.size() / groups));
    inner_ = apart_->inner;
  }
  make(which.seed + (loads ? 77 : 0) + (broadcasts || loads ? inner_.rank() : 0));
  if (loads) load();
}

void Player::make(uint64_t seed) {
  const auto net = [&] { return Net::make(which_, seed); };
  subject_ = make_subject(which_, wrapper_, wrapper_.flag("deferred") ? deferred_init(net) : net(),
                          inner_);
  if (apart_) local_sgd_ = subject_->make_local_sgd(*apart_, local_sgd_options(wrapper_));
}

Record Player::play(const Item& event, int number) {
  Record record;
  const auto& kind = event.kind;
  if (kind == "step") {
    train(event, number, record);
    if (local_sgd_) {
      subject_->settle();
      local_sgd_->step();
    }
  } else if (kind == "join") join_event(event, number);
  else if (kind == "evaluate") evaluate(event, number, record);
  else if (kind == "freeze" || kind == "thaw") set_trainable(event.number("part"), kind == "thaw");
  else if (kind == "write") write(event);
  else if (kind == "lr") change_lr(event);
  else if (kind == "add_group") subject_->add_late_part();
  else if (kind == "to_dtype") subject_->net().to(other_dtype());
  else if (kind == "resume") resume(number);
  if (!event.flag("quiet")) add_weights(record, subject_->weights());
  if (event.flag("state")) add_state(record, subject_->optimizer_state());
  return record;
}

Seen Player::show(const Item& event, int number) {
  Seen seen{play(event, number), subject_->weights(), std::nullopt};
  if (changes_state(event)) seen.state = subject_->optimizer_state();
  return seen;
}

Carried Player::carry(std::shared_ptr<testing::TemporaryFolder> folder) {
  if (folder) subject_->save(folder->path(), group_);
  const double lr = subject_->optimizer().param_groups().front().options().get_lr();
  return {subject_->weights(), subject_->optimizer_state(), lr, std::move(folder)};
}

/// Takes what the segment before has left.
void Player::load() {
  if (!carried_.folder) return subject_->load(carried_.weights, carried_.state);
  subject_->load(carried_.folder->path());
  for (auto& group : subject_->optimizer().param_groups()) group.options().set_lr(carried_.lr);
}

/// Everything is destroyed and goes on from a checkpoint, in the same world.
void Player::resume(int number) {
  const int number_of_group = apart_ ? apart_->outer.rank() : 0;
  const auto folder =
      scratch_ + "_" + std::to_string(number) + "_" + std::to_string(number_of_group);
  std::vector<double> rates;
  for (const auto& group : subject_->optimizer().param_groups())
    rates.push_back(group.options().get_lr());
  std::vector<bool> trainable;
  for (const auto& named : named_parameters(subject_->net()))
    trainable.push_back(named.second.requires_grad());
  subject_->settle();
  const auto outer = local_sgd_ ? local_sgd_->state_dict() : LocalSgd::State();
  subject_->save(folder, inner_, local_sgd_.get());
  local_sgd_.reset();
  subject_.reset();
  make(which_.seed + 100 + inner_.rank());
  subject_->load(folder);
  if (local_sgd_) load_local_sgd(*local_sgd_, outer, folder);
  for (size_t i = 0; i < rates.size(); ++i)
    subject_->optimizer().param_groups()[i].options().set_lr(rates[i]);
  for (auto& named : named_parameters(subject_->net())) {
    named.second.requires_grad_(trainable.front());
    trainable.erase(trainable.begin());
  }
  cleared_ = true;
}

at::ScalarType Player::other_dtype() const {
  return dtype_of(which_) == at::kFloat ? at::kDouble : at::kFloat;
}

at::Tensor Player::loss(const Item& event, int number, int micro, int micros) {
  subject_->net().slow = event.number("slow", -1) == group_.rank();
  return forward_loss([&](const Batch& batch) { return subject_->forward(batch); }, subject_->net(),
                      event, which_, number, micro, group_.rank(), micros);
}

void Player::zero_grad(const Item& event) {
  if (event.text("zero") == "module") subject_->net().zero_grad();
  else subject_->zero_grad(true);
}

/// The first attempt at a step, in which the user's code throws.
void Player::spring(const Item& event, int number) {
  auto& net = subject_->net();
  net.trap = trap_of(event);
  const bool caught = event.number("trap_rank", -1) < 0;
  if (!caught && event.number("trap_rank") % group_.size() != group_.rank())
    net.trap = Trap::nowhere;
  try {
    subject_->backward(loss(event, number, 0, 1), false);
  } catch (const Sprung&) {
    net.trap = Trap::nowhere;
    if (!caught) throw;
  }
  zero_grad(event);
}

void Player::train(const Item& event, int number, Record& record) {
  const bool between = event.text("when") == "between";
  const bool after = event.text("when") == "after" && cleared_;
  if (event.has("trap")) spring(event, number);
  at::Tensor kept;
  if (event.flag("kept_graph")) kept = loss(event, number, 9, 1);
  if (event.flag("closure")) {
    subject_->step([&] {
      zero_grad(event);
      auto value = loss(event, number, 0, 1);
      record.emplace_back("loss 0", value.detach().to(dtype_of(which_), false, true));
      subject_->backward(value, false);
      return value;
    });
  } else {
    if (!after && !between && !event.flag("uncleared")) zero_grad(event);
    gradients(event, number, between, record);
    if (event.has("thaws")) set_trainable(event.number("thaws"), true);
    if (event.has("scaled")) subject_->scale_gradients(event.real("scaled", 1));
    if (event.has("scaler") && !unscale()) {
      subject_->zero_grad(true);
      cleared_ = true;
      return;
    }
    if (event.has("norm_of"))
      add_number(record, "norm", subject_->clip_norm(INFINITY, norm_type(event)));
    if (event.text("clip") == "norm") add_number(record, "norm", subject_->clip_norm(kMaxNorm, 2));
    if (event.text("clip") == "value") subject_->clip_value();
    subject_->step(nullptr);
    if (shows_norm_of_step(wrapper_, event))
      add_number(record, "norm of step", subject_->norm_of_step());
  }
  cleared_ = after;
  if (after) zero_grad(event);
  if (kept.defined()) {
    if (event.flag("then_evaluate")) evaluate(event, number, record);
    zero_grad(event);
    subject_->backward(kept, false);
    zero_grad(event);
  }
}

/// Whether the step may be made.
bool Player::unscale() {
  const bool skip = scaler_.found_inf(subject_->gradients(), group_);
  if (!skip) subject_->scale_gradients(scaler_.inverse());
  scaler_.update(skip);
  return !skip;
}

void Player::gradients(const Item& event, int number, bool clear_between, Record& record) {
  const int micros = event.number("micro", 1);
  for (int micro = 0; micro < micros; ++micro) {
    std::optional<NoSync> hold;
    if (micro + 1 < micros && event.flag("no_sync")) hold.emplace(subject_->no_sync());
    auto value = loss(event, number, micro, micros);
    record.emplace_back("loss " + std::to_string(micro),
                        value.detach().to(dtype_of(which_), false, true));
    if (event.has("scaler")) value = scaler_.scale(value);
    if (clear_between && micro == 0) zero_grad(event);
    if (event.number("absent", -1) == group_.rank()) continue;
    if (event.flag("retain")) subject_->backward(value, true);
    subject_->backward(value, false);
    if (event.has("replaced") && micro == 0) subject_->replace_gradients(event.real("replaced", 1));
  }
}

void Player::join_event(const Item& event, int number) {
  subject_->prepare_join([this] {
    subject_->step(nullptr);
    subject_->zero_grad(true);
  });
  subject_->zero_grad(true);
  JoinOptions options;
  options.divide_by_initial_world_size = !event.flag("by_active");
  join(subject_->joinables(), options, [&](JoinLoop& iteration) {
    for (int round = 0; round < batches_in_join(event, group_.rank()); ++round) {
      iteration.next();
      subject_->backward(loss(event, number, round, 1), false);
      subject_->step(nullptr);
      subject_->zero_grad(true);
    }
  });
  subject_->zero_grad(true);
  cleared_ = true;
}

void Player::evaluate(const Item& event, int number, Record& record) {
  if (event.number("rank", group_.rank()) != group_.rank()) return;
  at::NoGradGuard no_grad;
  subject_->net().eval();
  const auto dtype = dtype_of(which_);
  const auto batch = make_batch(which_.seed, number, 0, group_.rank(), dtype);
  record.emplace_back("output", subject_->forward(batch).to(dtype));
  subject_->net().train();
}

void Player::set_trainable(int part, bool on) {
  for (auto& parameter : subject_->net().part(part).parameters()) parameter.requires_grad_(on);
}

void Player::write(const Item& event) {
  subject_->change([&] {
    at::NoGradGuard no_grad;
    for (auto& parameter : subject_->net().part(event.number("part")).parameters())
      parameter.mul_(0.5);
  });
}

void Player::change_lr(const Item& event) {
  if (event.number("rank", group_.rank()) != group_.rank()) return;
  scale_lr(subject_->optimizer(), event.real("factor", 0.5));
}

}  // namespace tessera::fuzz
