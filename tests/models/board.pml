/* SPDX-License-Identifier: BSL-1.0
 *
 * Collectives at a board: Seat::start, Seat::work and Seat::retire (include/gradsync/collective/shared_memory/seat.hpp), for Spin.
 *
 * RANKS ranks run LAST collectives in SLOTS slots (the program has 512). Each rank has a thread that starts them and one that works. Shares
 * have 0, 1 or 2 chunks.
 *
 * Checked, for every order of steps and for late stores:
 *   - whoever works on a collective reads the calls of that collective, not those of another one in the same slot;
 *   - every chunk is worked on once, before its share is done, and a share that is done stays so;
 *   - all ranks come to the end.
 *
 * Stores wait in a queue of their thread before others see them, in order, as on x86. Relaxed stores between two releases enter it in any
 * order. So a load can overtake the stores before it. Not modelled: failures, sleep, several calls of start at a time, loads that overtake
 * loads (the acquires forbid it where it matters).
 *
 * MUTANT is a mistake that the model must find: see the uses.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef LAST
#define LAST 3
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef MUTANT
#define MUTANT 0
#endif

#define AT(n, r) (((n) % SLOTS) * RANKS + (r))
#define CHUNKS(n, r) ((2 * (n) + (r)) % 3)

/* What all ranks see. */
byte call[SLOTS * RANKS];        /* number of the collective whose call is in the cell, + 1 */
byte arrived[SLOTS * RANKS];     /* number + 1 */
byte next_chunk[SLOTS * RANKS];
byte chunks_done[SLOTS * RANKS];
byte done[SLOTS * RANKS];        /* number + 1 */
byte retired[RANKS];

byte started[RANKS];             /* next_: of one rank's threads */
byte worked[LAST * RANKS];       /* not in the program: chunks that were worked on */

mtype = {CALL, NEXT, CHUNKS_DONE, ARRIVED, DONE, RETIRED};

/* The stores of a thread that others do not see yet. */
chan stores[2 * RANKS] = [5] of {mtype, byte, byte};
#define STORE(what, at, value) stores[thread]!what, at, value

proctype Memory(byte thread) {
    mtype what;
    byte at, value;
end:
    do
    :: atomic {
            stores[thread]?what, at, value;
            if
            :: what == CALL -> call[at] = value
            :: what == NEXT -> next_chunk[at] = value
            :: what == CHUNKS_DONE -> chunks_done[at] = value
            :: what == ARRIVED -> arrived[at] = value
            :: what == DONE -> assert(done[at] <= value); done[at] = value
            :: what == RETIRED -> retired[at] = value
            fi
        }
    od
}

#if RANKS == 2
#define ALL_ARRIVED(n) (arrived[AT(n, 0)] == (n) + 1 && arrived[AT(n, 1)] == (n) + 1)
#define IS_DONE(n) (done[AT(n, 0)] > (n) && done[AT(n, 1)] > (n))
#define MAY_START(n) ((n) - retired[0] < SLOTS && (n) - retired[1] < SLOTS)
#else
#define ALL_ARRIVED(n) (arrived[AT(n, 0)] == (n) + 1 && arrived[AT(n, 1)] == (n) + 1 && arrived[AT(n, 2)] == (n) + 1)
#define IS_DONE(n) (done[AT(n, 0)] > (n) && done[AT(n, 1)] > (n) && done[AT(n, 2)] > (n))
#define MAY_START(n) ((n) - retired[0] < SLOTS && (n) - retired[1] < SLOTS && (n) - retired[2] < SLOTS)
#endif

/* Seat::start */
proctype Starter(byte rank) {
    byte n;
    byte thread = rank;
    do
    :: n == LAST -> break
    :: else ->
#if MUTANT == 1                        /* a slot is reused although a rank still needs it */
        (n - retired[rank] < SLOTS);
#else
        MAY_START(n);
#endif
#if MUTANT == 2                        /* the flag is stored relaxed: it may come before the call */
        STORE(ARRIVED, AT(n, rank), n + 1);
#endif
        if
        :: atomic { STORE(CALL, AT(n, rank), n + 1); STORE(NEXT, AT(n, rank), 0); STORE(CHUNKS_DONE, AT(n, rank), 0) }
        :: atomic { STORE(CHUNKS_DONE, AT(n, rank), 0); STORE(CALL, AT(n, rank), n + 1); STORE(NEXT, AT(n, rank), 0) }
        :: atomic { STORE(NEXT, AT(n, rank), 0); STORE(CHUNKS_DONE, AT(n, rank), 0); STORE(CALL, AT(n, rank), n + 1) }
        fi;
#if MUTANT != 2
        STORE(ARRIVED, AT(n, rank), n + 1);
#endif
        atomic { n++; started[rank] = n }
    od
}

inline collect_calls(n) {
    d_step {
        r = 0;
        do
        :: r == RANKS -> break
        :: else -> assert(call[AT(n, r)] == n + 1); r++
        od;
        r = 0
    }
}

inline work_share(n, owner) {
    do
    :: next_chunk[AT(n, owner)] >= CHUNKS(n, owner) -> break
    :: else ->
        atomic {
            chunk = next_chunk[AT(n, owner)];
            next_chunk[AT(n, owner)]++;
            if
            :: chunk >= CHUNKS(n, owner) -> break
            :: else -> skip
            fi
        }
        atomic { worked[n * RANKS + owner]++; assert(worked[n * RANKS + owner] <= CHUNKS(n, owner)); mine++ }
    od;
    atomic {
        if
        :: mine == 0 -> skip
        :: mine > 0 && mine == CHUNKS(n, owner) -> STORE(DONE, AT(n, owner), n + 1)
        :: else ->
            empty(stores[thread]);     /* it is a release */
            chunks_done[AT(n, owner)] = chunks_done[AT(n, owner)] + mine;
            if
#if MUTANT == 3                        /* a share is done once its last chunk is taken */
            :: next_chunk[AT(n, owner)] >= CHUNKS(n, owner) -> STORE(DONE, AT(n, owner), n + 1)
#endif
            :: chunks_done[AT(n, owner)] == CHUNKS(n, owner) -> STORE(DONE, AT(n, owner), n + 1)
            :: else -> skip
            fi
        fi;
        mine = 0;
        chunk = 0
    }
}

/* Seat::work. Its parts come in any order: a thread helps others whenever it likes. */
proctype Worker(byte rank) {
    byte own, others, oldest, r, mine, chunk;
    byte thread = RANKS + rank;
    do
    :: oldest == LAST -> break
    :: own < started[rank] && ALL_ARRIVED(own) ->          /* work_own_shares */
        collect_calls(own);
        do                                                 /* settle_empty_shares */
        :: atomic { r == RANKS -> r = 0; break }
        :: atomic {
                r < RANKS ->
                if
                :: CHUNKS(own, r) == 0 && done[AT(own, r)] <= own -> STORE(DONE, AT(own, r), own + 1)
                :: else -> skip
                fi;
                r++
            }
        od;
        work_share(own, rank);
        own++
    :: others < own ->                                     /* work_other_shares */
        if
        :: IS_DONE(others) -> skip
        :: else ->
            collect_calls(others);
            do
            :: atomic { r == RANKS -> r = 0; break }
            :: r < RANKS -> work_share(others, r); r++
            od
        fi;
        others++
    :: oldest < own && IS_DONE(oldest) ->                  /* retire */
        d_step {
            do
            :: r == RANKS -> break
            :: else -> assert(worked[oldest * RANKS + r] == CHUNKS(oldest, r)); r++
            od;
            r = 0
        }
        atomic {
            oldest++;
            if
            :: others < oldest -> others = oldest
            :: else -> skip
            fi;
            STORE(RETIRED, rank, oldest)
        }
    od
}

init {
    byte r;
    atomic {
        do
        :: r == RANKS -> break
        :: else -> run Memory(r); run Memory(RANKS + r); run Starter(r); run Worker(r); r++
        od
    }
}
