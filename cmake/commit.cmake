# cmake -DSOURCE=DIR -DOUTPUT=FILE.h -P commit.cmake: writes the commit of SOURCE, and whether files differ from it, as
# a header. "unknown" where there is no git. The file is left alone when it is right, so that nothing is rebuilt.
set(commit "unknown")
find_program(git git)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE} describe --always --abbrev=12 --exclude=* --dirty=-changed
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed AND found MATCHES "^[0-9a-f]+(-changed)?$")
    set(commit ${found})
  endif()
endif()
set(text "inline constexpr char kBuiltCommit[] = \"${commit}\";\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT text STREQUAL "${old}")
  file(WRITE ${OUTPUT} "${text}")
endif()
