/* The version of library, program, module and checkpoints. */
#ifndef PG_VERSION_H
#define PG_VERSION_H

#define PG_VERSION "0.1.0"

#endif
