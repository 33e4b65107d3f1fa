package cache

import (
	"context"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/compilers"
)

// sandbox returns what confines the execution providers' code, found out once by trying. It is empty
// for a compiler that has no such code.
func (c *Cache) sandbox(ctx context.Context) ([]compilers.Measure, error) {
	s, ok := c.compiler.(compilers.Sandboxed)
	if !ok {
		return nil, nil
	}
	measures, err := s.Sandbox(ctx)
	if err != nil {
		return nil, request.WorkerError(err, "sandbox")
	}
	return measures, nil
}
