# The third-party libraries as imported targets. They come from the system, or all of them from .deps, the folder that
# tools/fetch_deps.sh fills for machines without a package network. Never some from each: one include folder holds the
# headers of all, and headers of one version must not meet the library of another.
option(OFFLOAD_PREFER_DEPS "take the libraries from .deps even where the system has them" OFF)
set(OFFLOAD_DEPS ${CMAKE_SOURCE_DIR}/.deps/usr)

# TARGET HEADER LIBRARY PACKAGE; LIBRARY is - for a library that is headers alone.
set(OFFLOAD_LIBRARIES
  "nlohmann_json::nlohmann_json nlohmann/json.hpp  -         nlohmann-json3-dev"
  "fmt::fmt                     fmt/format.h       fmt       libfmt-dev"
  "CLI11::CLI11                 CLI/CLI.hpp        -         libcli11-dev"
  "doctest::doctest             doctest/doctest.h  -         doctest-dev"
  "offload::pcre2               pcre2.h            pcre2-8   libpcre2-dev"
  "offload::utf8proc            utf8proc.h         utf8proc  libutf8proc-dev"
  "offload::uring               liburing.h         uring     liburing-dev"
  "offload::hwloc               hwloc.h            hwloc     libhwloc-dev"
)

# Sets <out>_INCLUDE and <out>_LIBRARY to paths, or to ...-NOTFOUND. Nothing is cached: a .deps that was filled or
# emptied since the last configure counts at once.
function(offload_find_in_system out header library)
  unset(include)
  unset(path)
  find_path(include ${header} NO_CACHE)
  find_library(path ${library} NO_CACHE)
  set(${out}_INCLUDE ${include} PARENT_SCOPE)
  set(${out}_LIBRARY ${path} PARENT_SCOPE)
endfunction()

# Static archives only, so that a program built from .deps runs where .deps is not.
function(offload_find_in_deps out header library)
  unset(include)
  unset(path)
  find_path(include ${header} PATHS ${OFFLOAD_DEPS}/include NO_DEFAULT_PATH NO_CACHE)
  file(GLOB folders ${OFFLOAD_DEPS}/lib/*-linux-gnu)
  file(GLOB include_by_arch ${OFFLOAD_DEPS}/include/*-linux-gnu)
  find_library(path lib${library}.a PATHS ${folders} NO_DEFAULT_PATH NO_CACHE)
  if(library STREQUAL "fmt")
    set(path -)  # Debian has no libfmt.a; fmt also works as headers alone
  endif()
  if(include)
    list(APPEND include ${include_by_arch})  # hwloc/autogen/config.h
  endif()
  set(${out}_INCLUDE ${include} PARENT_SCOPE)
  set(${out}_LIBRARY ${path} PARENT_SCOPE)
endfunction()

# Looks for every library in `place` (system | deps); <out> becomes the packages that were not found there.
macro(offload_find_all place out)
  set(${out} "")
  foreach(row IN LISTS OFFLOAD_LIBRARIES)
    separate_arguments(row UNIX_COMMAND "${row}")
    list(GET row 0 target)
    list(GET row 1 header)
    list(GET row 2 library)
    list(GET row 3 package)
    cmake_language(CALL offload_find_in_${place} ${target} ${header} ${library})
    if(library STREQUAL "-")
      set(${target}_LIBRARY -)
    endif()
    if("${${target}_INCLUDE}" MATCHES "NOTFOUND$" OR "${${target}_LIBRARY}" MATCHES "NOTFOUND$")
      list(APPEND ${out} ${package})
    endif()
  endforeach()
endmacro()

set(missing_in_system "not searched")
if(NOT OFFLOAD_PREFER_DEPS)
  offload_find_all(system missing_in_system)
endif()
set(OFFLOAD_USES_DEPS FALSE)
if(missing_in_system)
  offload_find_all(deps missing_in_deps)
  if(missing_in_deps AND OFFLOAD_PREFER_DEPS)
    list(JOIN missing_in_deps " " names)
    message(FATAL_ERROR "OFFLOAD_PREFER_DEPS is on, but ${OFFLOAD_DEPS} lacks: ${names}. Fill it with "
                        "tools/fetch_deps.sh, or turn OFFLOAD_PREFER_DEPS off.")
  elseif(missing_in_deps)
    list(JOIN missing_in_system " " names)
    message(FATAL_ERROR "libraries are missing: ${names}. Install these packages (Debian, Ubuntu: tools/packages.sh "
                        "names and installs them), or fill .deps with tools/fetch_deps.sh.")
  endif()
  set(OFFLOAD_USES_DEPS TRUE)
  message(STATUS "libraries come from ${OFFLOAD_DEPS}")
endif()

foreach(row IN LISTS OFFLOAD_LIBRARIES)
  separate_arguments(row UNIX_COMMAND "${row}")
  list(GET row 0 target)
  add_library(${target} INTERFACE IMPORTED)
  target_include_directories(${target} INTERFACE ${${target}_INCLUDE})
  if(NOT "${${target}_LIBRARY}" STREQUAL "-")
    target_link_libraries(${target} INTERFACE ${${target}_LIBRARY})
  endif()
endforeach()

if(OFFLOAD_USES_DEPS)
  target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY=1)
  # libhwloc.a calls libudev, which has no archive; the library itself is part of every Debian and Ubuntu system.
  find_library(udev NAMES libudev.so.1 libudev.so NO_CACHE)
  if(NOT udev)
    message(FATAL_ERROR "libudev.so.1 was not found (Debian, Ubuntu: package libudev1); hwloc needs it.")
  endif()
  target_link_libraries(offload::hwloc INTERFACE ${udev})
endif()
