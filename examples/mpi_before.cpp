// A simulation that trains a network on some of its ranks, with MPI by hand: every training rank
// has the whole optimizer state, and one MPI_Allreduce averages each gradient after backward.

#include <iostream>

#include <mpi.h>
#include <torch/torch.h>

void train(MPI_Comm comm) {
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);

  torch::manual_seed(0);  // the same weights on every rank
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::Tanh(),
                            torch::nn::Linear(256, 1));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(1 + rank);  // every rank has its own samples
  for (int step = 0; step < 100; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(net->forward(x), x.sum(1, true));
    loss.backward();
    for (auto& p : net->parameters()) {
      MPI_Allreduce(MPI_IN_PLACE, p.grad().data_ptr<float>(), static_cast<int>(p.numel()),
                    MPI_FLOAT, MPI_SUM, comm);
      p.mutable_grad() /= size;
    }
    optimizer.step();
    optimizer.zero_grad();
    if (rank == 0 && step % 20 == 19)
      std::cout << "step " << step + 1 << ", loss " << loss.item<float>() << std::endl;
  }
  if (rank == 0) torch::save(net, "before.pt");
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm training = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank < 2 ? 0 : MPI_UNDEFINED, rank, &training);
  if (training != MPI_COMM_NULL) train(training);
  // The other ranks simulate meanwhile.
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
}
