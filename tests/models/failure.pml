/* SPDX-License-Identifier: BSL-1.0
 *
 * How a world ends: World::fail (include/gradsync/collective/world.hpp), and Seat::work beside Seat::quiesce (shared_memory/seat.hpp), for
 * Spin.
 *
 * RANKS ranks work on one another's buffers until one of them fails. Whoever fails, or sees that the world has failed, waits until nobody
 * is busy, and frees its buffer. One rank may die at any step, also while it writes the failure.
 *
 * Checked, for every order of steps:
 *   - nobody touches a buffer that has been freed;
 *   - one failure is recorded, whole, and all see the same;
 *   - all that live come to the end.
 *
 * A store that is not sequentially consistent waits before others see it, and loads overtake it; that is what the mutants 1 and 2 do. A
 * rank waits 100 ms for the writer of a failure: the model takes it that a writer that is late by so much has died. Not modelled: chunks
 * that outlive the limit of quiesce() (the rank was stopped).
 *
 * MUTANT is a mistake that the model must find: see the uses.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef MUTANT
#define MUTANT 0
#endif

byte failed;                     /* 0: no; odd: being written; even: yes */
byte code, message;              /* two parts of the failure: the rank that wrote it */
byte writer = RANKS;             /* not in the program: who is writing */
bool busy[RANKS], dead[RANKS], freed[RANKS];
bool someone_died;
byte seen = RANKS;               /* not in the program: the failure that the first rank has read */

/* Stores that others do not see yet, for the mutants: 0 none, else the value + 1. */
byte late_busy[RANKS], late_failed[RANKS];

#define FAILED (failed != 0 && failed % 2 == 0)
#define DIES atomic { !someone_died -> someone_died = true; dead[me] = true; goto over }

proctype Rank(byte me) {
    byte r, k, own, work;
    do
    :: work < 2 ->                                         /* Seat::work */
        work++;
#if MUTANT == 1                                            /* busy is stored relaxed */
        late_busy[me] = 2;
#else
        busy[me] = true;
#endif
        k = 0;
        do
        :: k == 2 || FAILED -> break
        :: k < 2 && !FAILED ->                             /* a chunk */
            if
            :: true -> skip
            :: DIES
            fi;
            d_step {
                do
                :: r == RANKS -> break
                :: else -> assert(!freed[r] || dead[r]); r++
                od;
                r = 0
            }
            k++
        od;
        atomic { late_busy[me] = 0; busy[me] = false }     /* a release, after what was touched */
    :: !FAILED -> break                                    /* this rank fails */
    :: FAILED -> goto ended
    :: DIES
    od;

    own = 1;                                               /* World::fail */
    k = 0;
    do
    :: atomic { failed == k -> failed = own; writer = me }
        break
    :: failed != k ->
        if
        :: FAILED -> goto ended
        :: atomic { failed % 2 == 1 && dead[writer] -> k = failed }
#if MUTANT == 3                                            /* all that have waited write */
            break
#else
            own = k + 2
#endif
        fi
    od;
    if
    :: true -> skip
    :: DIES
    fi;
    code = me;
    if
    :: true -> skip
    :: DIES
    fi;
    message = me;
    if
    :: true -> skip
    :: DIES
    fi;
#if MUTANT == 2                                            /* the flag is stored with release only */
    late_failed[me] = own + 2;
#else
    failed = own + 1;
#endif

ended:
    if
    :: late_failed[me] == 0 ->                             /* whoever fails need not read its own failure */
        (FAILED);
        assert(code == message);
        atomic {
            if
            :: seen == RANKS -> seen = code
            :: else -> assert(seen == code)
            fi
        }
    :: else -> skip
    fi;
    r = 0;                                                 /* Seat::quiesce */
    do
    :: r == RANKS -> break
    :: else -> (!busy[r] || dead[r]); r++
    od;
    freed[me] = true;
over:
    skip
}

#if MUTANT == 1 || MUTANT == 2
proctype Memory(byte me) {
end:
    do
    :: atomic { late_busy[me] != 0 -> busy[me] = true; late_busy[me] = 0 }
    :: atomic { late_failed[me] != 0 -> failed = late_failed[me] - 1; late_failed[me] = 0 }
    od
}
#endif

init {
    byte r;
    atomic {
        do
        :: r == RANKS -> break
        :: else ->
            run Rank(r);
#if MUTANT == 1 || MUTANT == 2
            run Memory(r);
#endif
            r++
        od
    }
}
