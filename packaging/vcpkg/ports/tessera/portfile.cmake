# An overlay port: it builds the tree that it is part of.
#     vcpkg install tessera --overlay-ports=packaging/vcpkg/ports
vcpkg_check_linkage(ONLY_DYNAMIC_LIBRARY)
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        -DTESSERA_BUILD_TESTS=OFF
        -DTESSERA_BUILD_EXAMPLES=OFF
        -DTESSERA_WERROR=OFF
        "-DTESSERA_TORCH=${CURRENT_INSTALLED_DIR}"
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME Tessera CONFIG_PATH lib/cmake/Tessera)
vcpkg_fixup_pkgconfig()
vcpkg_copy_tools(TOOL_NAMES tessera tessera-train tessera-weights AUTO_CLEAN)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
