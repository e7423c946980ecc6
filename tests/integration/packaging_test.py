#!/usr/bin/env python3
"""The recipes of packaging/ fit the build. vcpkg and Spack themselves are not needed: stand-ins take their functions' places.

    packaging_test.py SOURCE_FOLDER BUILD_FOLDER
"""
import json, pathlib, re, subprocess, sys, tempfile, types, unittest

SOURCE, BUILD = (pathlib.Path(word).resolve() for word in (sys.argv.pop(1), sys.argv.pop(1)))
CMAKE = (SOURCE / "CMakeLists.txt").read_text()
VERSION = re.search(r"project\(Tessera VERSION ([\d.]+)", CMAKE)[1]
OPTIONS = set(re.findall(r'(?:option\(|set\()(TESSERA_\w+)', CMAKE)) | {"TESSERA_TORCH"}
# What CMake looks for, by the names of vcpkg and Spack.
PORTS = {"yaml-cpp": "yaml-cpp", "nlohmann_json": "nlohmann-json", "CLI11": "cli11", "fmt": "fmt", "spdlog": "spdlog", "OpenSSL": "openssl"}
BESIDES = {"xxhash", "gloo"}  # by find_path


def searched():
    found = set(re.findall(r"find_package\(([\w-]+)", CMAKE)) - {"Threads"}
    assert "find_path(XXHASH_INCLUDE_DIR" in CMAKE
    return {PORTS[name] for name in found} | BESIDES


class Vcpkg(unittest.TestCase):
    port = SOURCE / "packaging/vcpkg/ports/tessera"

    def test_version_and_dependencies(self):
        manifest = json.loads((self.port / "vcpkg.json").read_text())
        self.assertEqual((manifest["name"], manifest["version"]), ("tessera", VERSION))
        names = [each if isinstance(each, str) else each["name"] for each in manifest["dependencies"]]
        self.assertEqual(names, sorted(names), "vcpkg's order")
        self.assertEqual(set(names) - {"vcpkg-cmake", "vcpkg-cmake-config"}, searched() | {"libtorch"})

    def test_the_script(self):
        functions = ("check_linkage", "cmake_configure", "cmake_install", "cmake_config_fixup", "fixup_pkgconfig", "copy_tools", "install_copyright")
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "run.cmake"
            script.write_text(
                "".join(f'function(vcpkg_{name})\n  message(STATUS "{name}: ${{ARGN}}")\nendfunction()\n' for name in functions)
                + f'set(CURRENT_INSTALLED_DIR {folder}/installed)\nset(CURRENT_PACKAGES_DIR {folder}/packages)\ninclude({self.port}/portfile.cmake)\n')
            done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            calls = dict(line[3:].split(": ", 1) for line in done.stdout.splitlines())
            self.assertEqual(set(calls), set(functions))
            self.assertIn(f"SOURCE_PATH;{SOURCE};", calls["cmake_configure"])
            self.assertIn(f"-DTESSERA_TORCH={folder}/installed", calls["cmake_configure"])
            self.assertLessEqual(set(re.findall(r"-D(\w+)=", calls["cmake_configure"])), OPTIONS)
            self.assertTrue(pathlib.Path(calls["install_copyright"].removeprefix("FILE_LIST;")).is_file())
            # What the port moves is what an installation has.
            install = pathlib.Path(folder) / "install"
            done = subprocess.run(["cmake", "--install", BUILD, "--prefix", install], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            tools = calls["copy_tools"].removeprefix("TOOL_NAMES;").removesuffix(";AUTO_CLEAN").split(";")
            self.assertEqual(sorted(tools), sorted(path.name for path in (install / "bin").iterdir()))
            (config,) = install.rglob("TesseraConfig.cmake")
            self.assertEqual(config.parent.name, calls["cmake_config_fixup"].rpartition("/")[2])


class Spack(unittest.TestCase):
    def test_the_recipe(self):
        calls = []
        package = types.ModuleType("spack.package")
        package.CMakePackage = type("CMakePackage", (), {"define": staticmethod(lambda name, value: (name, value))})
        for name in ("license", "version", "generator", "depends_on", "conflicts"):
            setattr(package, name, lambda *words, name=name, **options: calls.append((name, words[0])))
        package.__all__ = ["CMakePackage", "license", "version", "generator", "depends_on", "conflicts"]
        sys.modules.update({"spack": types.ModuleType("spack"), "spack.package": package})
        self.addCleanup(lambda: [sys.modules.pop(name) for name in ("spack", "spack.package")])
        path = SOURCE / "packaging/spack/packages/tessera/package.py"
        scope = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        self.assertIn(("version", VERSION), calls)
        depends = {re.split(r"[@ ]", text)[0] for name, text in calls if name == "depends_on"}
        self.assertEqual(depends - {"cxx", "cmake"}, searched() | {"py-torch"})
        (cmake,) = [text for name, text in calls if name == "depends_on" and text.startswith("cmake@")]
        self.assertEqual(cmake, f"cmake@{re.search(r'VERSION ([0-9.]+)', CMAKE)[1]}:")

        recipe = scope["Tessera"]()
        recipe.spec = {"python": types.SimpleNamespace(package=types.SimpleNamespace(platlib="lib/python3.11/site-packages")),
                       "py-torch": types.SimpleNamespace(prefix="/opt/py-torch")}
        arguments = dict(recipe.cmake_args())
        self.assertEqual(arguments["TESSERA_TORCH"], "/opt/py-torch/lib/python3.11/site-packages/torch")
        self.assertLessEqual(set(arguments), OPTIONS)
        self.assertRegex((path.parents[2] / "repo.yaml").read_text(), r"(?m)^repo:\n  namespace: tessera$")


if __name__ == "__main__":
    unittest.main()
