// The program of mpi_before.cpp with Tessera: the optimizer averages the gradients of the ranks of
// a communicator, and each of them has a part of its state.

#include <iostream>

#include <tessera/mpi.h>
#include <tessera/tessera.h>

void train(MPI_Comm comm) {
  auto group = tessera::init_process_group(comm);

  torch::manual_seed(0);  // without it rank 0's weights are used
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::Tanh(),
                            torch::nn::Linear(256, 1));
  tessera::ZeroRedundancyOptimizer optimizer(
      *net, group,
      tessera::optimizer_factory<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)));

  torch::manual_seed(1 + group.rank());  // every rank has its own samples
  for (int step = 0; step < 100; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(net->forward(x), x.sum(1, true));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (group.rank() == 0 && step % 20 == 19)
      std::cout << "step " << step + 1 << ", loss " << loss.item<float>() << std::endl;
  }
  if (group.rank() == 0) torch::save(net, "after.pt");
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm training = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank < 2 ? 0 : MPI_UNDEFINED, rank, &training);
  try {
    if (training != MPI_COMM_NULL) train(training);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    MPI_Abort(MPI_COMM_WORLD, 1);  // MPI_Finalize would wait for ranks that failed
  }
  // The other ranks simulate meanwhile.
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
}
