# Checks around the CUDA toolkit. Functions only, so that `cmake -P` can test them (tests/test_kernels_build.py).

# Row B1. `result`: BUILD_PARALLEL from the environment, 8 by default, capped by the cores of this machine.
function(astrai_build_parallel result)
  set(jobs 8)
  if(DEFINED ENV{BUILD_PARALLEL})
    set(jobs "$ENV{BUILD_PARALLEL}")
    if(NOT jobs MATCHES "^[1-9][0-9]*$")
      message(FATAL_ERROR "BUILD_PARALLEL=${jobs}: expected a positive integer")
    endif()
  endif()
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  if(jobs GREATER cores)
    set(jobs ${cores})
  endif()
  set(${result} ${jobs} PARENT_SCOPE)
endfunction()

# `result`: the --generate-code options for `architectures`, named as CMake names them: 86-real is machine code, 100-virtual
# PTX, 120 both.
#
# The front end, half of the work, runs once for each of `front_ends` that is needed. An architecture takes the PTX of the
# latest of them that it can run; one with a suffix, such as 90a, takes its own. Where no source asks for something that
# lies between the two (__CUDA_ARCH__), the machine code is that of a front end of its own, instruction by instruction.
function(astrai_generate_code result front_ends architectures)
  set(used "")
  foreach(architecture IN LISTS architectures)
    if(NOT architecture MATCHES "^([0-9]+)([af]?)(-real|-virtual)?$")
      message(FATAL_ERROR "CUDA architecture ${architecture}: expected names such as 86-real or 90a-real; set CUDAARCHS")
    endif()
    set(number ${CMAKE_MATCH_1})
    set(name ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
    set(kind "${CMAKE_MATCH_3}")
    set(front_end ${name})
    if(name STREQUAL number)
      set(front_end "")
      foreach(candidate IN LISTS front_ends)  # in rising order
        if(candidate LESS_EQUAL number)
          set(front_end ${candidate})
        endif()
      endforeach()
    endif()
    list(GET front_ends 0 least)
    if(number LESS least)
      message(FATAL_ERROR "CUDA architecture ${architecture}: the kernels need ${least} or later; set CUDAARCHS")
    endif()
    list(APPEND used ${front_end})
    if(NOT kind STREQUAL "-virtual")
      list(APPEND code_${front_end} sm_${name})
    endif()
    if(NOT kind STREQUAL "-real")
      list(APPEND code_${front_end} compute_${front_end})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES used)
  set(options "")
  foreach(front_end IN LISTS used)
    list(REMOVE_DUPLICATES code_${front_end})
    list(JOIN code_${front_end} "," code)
    list(APPEND options "--generate-code=arch=compute_${front_end},code=[${code}]")
  endforeach()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()

# `result`: the option under which nvcc compresses machine code, which is most of a wheel. zstd is four times as small as
# LZ4, but drivers read it from CUDA 12.4 on only, so code of nvcc 12.x, which older drivers load, keeps to LZ4.
function(astrai_compression result nvcc_version)
  if(nvcc_version VERSION_LESS 13)
    set(${result} -Xfatbin=-compress-all PARENT_SCOPE)
  else()
    set(${result} --compress-mode=size PARENT_SCOPE)
  endif()
endfunction()

# A version 0.1.0+cu128 must come out of nvcc 12.8: a label that the code does not fit would never be noticed later.
function(astrai_check_label version nvcc_version)
  if(NOT version MATCHES "\\+cu([0-9]+)([0-9])$")
    return()
  endif()
  set(wanted "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
  if(NOT nvcc_version MATCHES "^${CMAKE_MATCH_1}\\.${CMAKE_MATCH_2}(\\.|$)")
    message(FATAL_ERROR "ASTRAI_CUDA_LABEL asks for version ${version}, which needs nvcc ${wanted}, "
                        "but nvcc is ${nvcc_version}: point CUDACXX at nvcc ${wanted} or change the label")
  endif()
endfunction()

# Row B3. The extension links nothing of torch, so a mismatch is no build error; but a kernel compiled for CUDA 13
# needs a newer driver than a torch for CUDA 12 does. Without torch there is nothing to compare.
function(astrai_warn_torch_mismatch python nvcc_version)
  execute_process(COMMAND "${python}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../build_support/torch_cuda.py"
                  OUTPUT_VARIABLE torch_cuda OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT torch_cuda)
    return()
  endif()
  string(REGEX MATCH "^[0-9]+" torch_major "${torch_cuda}")
  string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc_version}")
  if(NOT torch_major STREQUAL nvcc_major)
    message(WARNING "nvcc is CUDA ${nvcc_version} but the installed torch is built for CUDA ${torch_cuda}: "
                    "point CUDACXX at nvcc ${torch_major}.x, or install a torch for CUDA ${nvcc_major}")
  endif()
endfunction()
