// Package dialogue holds the messages between epcached and its worker process, epcached-ort.
//
// The worker reads one [Request] from descriptor 3, and where that says so waits there for its model, or for the request proper, and writes [Event] records to descriptor 4, each as one line of JSON. Standard output and
// standard error belong to the vendor's code. The last event carries a Result or a Refusal; a worker that ends without one has crashed, whatever
// its exit status says. Both ends bound what they read: a request by [MaxRequest], an event by [MaxEvent], the whole dialogue by [MaxEvents].
//
// Both programs are built from the same tree and installed together, so the messages carry one version number and no history: a worker of
// another version refuses.
package dialogue
