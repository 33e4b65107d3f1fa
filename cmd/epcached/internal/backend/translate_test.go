package backend

import (
	"os"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/epcached/epcached/cache/request"
	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

func TestEveryWishHasItsTranslation(t *testing.T) {
	seen := make(map[request.OnMiss]bool)
	for number, name := range wire.OnMiss_name {
		r, err := request.FromWire(request.Peer{},
			&wire.Acquire{OnMiss: wire.OnMiss(number), Model: &wire.Model{}}, []*os.File{nil})
		require.NoError(t, err, name)
		require.False(t, seen[r.OnMiss], name)
		seen[r.OnMiss] = true
	}
	_, err := request.FromWire(request.Peer{}, &wire.Acquire{OnMiss: 99}, nil)
	require.ErrorIs(t, WireError(err), unixsock.ErrVersion)
}

// Each way to have the compiled model written arrives at the cache.
func TestTheOutputArrives(t *testing.T) {
	asked := &wire.Output{}
	fields := asked.ProtoReflect().Descriptor().Fields()
	values := map[protoreflect.Kind]protoreflect.Value{
		protoreflect.StringKind: protoreflect.ValueOfString("x"),
		protoreflect.Int64Kind:  protoreflect.ValueOfInt64(1),
		protoreflect.BoolKind:   protoreflect.ValueOfBool(true)}
	for i := range fields.Len() {
		asked.ProtoReflect().Set(fields.Get(i), values[fields.Get(i).Kind()])
	}
	r, err := request.FromWire(request.Peer{}, &wire.Acquire{Model: &wire.Model{}, Output: asked},
		[]*os.File{nil})
	require.NoError(t, err)
	got := reflect.ValueOf(r.Output)
	require.Equal(t, fields.Len(), got.NumField())
	for i := range got.NumField() {
		require.False(t, got.Field(i).IsZero(), got.Type().Field(i).Name)
	}
	r, err = request.FromWire(request.Peer{}, &wire.Acquire{Model: &wire.Model{}}, []*os.File{nil})
	require.NoError(t, err)
	require.Zero(t, r.Output)
}
