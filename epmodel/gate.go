package epmodel

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Gate bounds the memory of readings that run at the same time. It blocks until there is memory for
// one that keeps up to 256 KiB, or for a large one, which keeps up to 16 MiB, or until ctx ends.
// leave returns the memory.
type Gate func(ctx context.Context, large bool) (leave func(), err error)

type gateKey struct{}

// WithGate returns a context under which [Read], [Tensors] and [Digest] pass the gate. Without one
// each is bounded on its own only.
func WithGate(ctx context.Context, gate Gate) context.Context {
	return context.WithValue(ctx, gateKey{}, gate)
}

// errLarge ends a walk that needs more memory than smallKept.
var errLarge = errors.New("more memory is needed")

// withGate calls work with the memory that it may use: little first, because that is enough for
// nearly every model, and then as much as any model may need. No walk waits for memory while it has
// some, so that walks never wait for each other. Long work that keeps only little memory may leave
// the gate.
func withGate(ctx context.Context, name string, work func(most int64, leave func()) error) error {
	gate, _ := ctx.Value(gateKey{}).(Gate)
	once := func(most int64) error {
		leave := func() {}
		if gate != nil {
			passed, err := gate(ctx, most > smallKept)
			if err != nil {
				return fmt.Errorf("%s: wait for memory: %w", name, err)
			}
			leave = sync.OnceFunc(passed)
			defer leave()
		}
		return work(most, leave)
	}
	err := once(smallKept)
	if errors.Is(err, errLarge) {
		err = once(maxKept)
	}
	return err
}
