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
