# cpack in the build folder makes Debian packages:
#   libtessera0      the library
#   libtessera-dev   headers, CMake package, pkg-config file
#   tessera          the commands tessera and tessera-train
# They belong to the Debian whose libtorch the build used: `dpkg-shlibdeps` writes the dependencies
# of the programs that were linked. A build against a wheel makes none, because no package of Debian
# contains its libtorch.
set(CPACK_GENERATOR DEB)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL runtime development tools)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR Tessera)
# The maintainer of a package is whoever builds it. devscripts' variables name that person; without
# them the field says that there is none, with an address that can never exist (RFC 2606).
set(contact "local build, no maintainer <nobody@tessera.invalid>")
if(DEFINED ENV{DEBEMAIL})
  set(contact "$ENV{DEBFULLNAME} <$ENV{DEBEMAIL}>")
  string(STRIP "${contact}" contact)
endif()
set(TESSERA_PACKAGE_CONTACT "${contact}" CACHE STRING "Maintainer of the packages: NAME <ADDRESS>")
set(CPACK_PACKAGE_CONTACT "${TESSERA_PACKAGE_CONTACT}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# tessera-train links the library of the package beside it.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
set(own_version "(= ${PROJECT_VERSION})")

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libtessera${TESSERA_SOVERSION})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libtessera-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
# A program that links the library includes libtorch's headers and those of Gloo.
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS
  "libtessera${TESSERA_SOVERSION} ${own_version}, libtorch-dev, libgloo-dev")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME tessera)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS "libtessera${TESSERA_SOVERSION} ${own_version}")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "The shared library.")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers, CMake package and pkg-config file.")
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "The launcher and the trainer.")
include(CPack)
