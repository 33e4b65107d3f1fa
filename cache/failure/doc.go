// Package failure says why compiles failed, in which words users hear of it, and for how long that is answered from memory instead of tried again.
//
// A Failure is made of what a worker or a compiler left (Of, OfLoad, OfOutput): its Reason decides what users are told to do, whether it may be the
// model's doing, and how long it counts. Its texts name no file and no user, so whoever has the same model may be told of it. What cannot be the
// model's doing is never remembered; whether it is, the caller finds out, for nothing is run here. Remembered may be used by any number of
// goroutines. Start reading at Of.
package failure
