import os

from spack.package import *


class Tessera(CMakePackage):
    """ZeRO and FSDP for the PyTorch C++ frontend."""

    # Spack builds the tree that this recipe is part of:
    #     spack repo add packaging/spack
    #     spack dev-build tessera@0.1.0
    license("Apache-2.0")

    version("0.1.0")

    generator("ninja")

    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    # libtorch is part of py-torch, which must have the new C++ ABI and Gloo.
    depends_on("py-torch@2.6: +distributed +gloo", type=("build", "link", "run"))
    depends_on("cli11")
    depends_on("fmt")
    depends_on("gloo")
    depends_on("nlohmann-json")
    depends_on("openssl")
    depends_on("spdlog +fmt_external")
    depends_on("xxhash")
    depends_on("yaml-cpp")

    conflicts("%gcc@:11", msg="Tessera needs C++20: GCC 12 or newer")

    def cmake_args(self):
        python = self.spec["python"].package
        torch = os.path.join(self.spec["py-torch"].prefix, python.platlib, "torch")
        return [
            self.define("TESSERA_TORCH", torch),
            self.define("TESSERA_BUILD_TESTS", False),
            self.define("TESSERA_BUILD_EXAMPLES", False),
            self.define("TESSERA_WERROR", False),
        ]
