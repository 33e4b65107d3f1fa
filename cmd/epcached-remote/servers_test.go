package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/portable"
	"github.com/epcached/epcached/remote"
)

// servers are the S3 servers that `make deps-remote` fetches: the program, and its arguments for an
// address, a port and a directory.
var servers = map[string]func(address, port, dir string) []string{
	"versitygw": func(address, _, dir string) []string {
		return []string{"--access", "user", "--secret", "secret-secret", "--port", address,
			"posix", dir}
	},
	"moto/bin/moto_server": func(_, port, _ string) []string { return []string{"-p", port} },
}

func TestRealServers(t *testing.T) {
	deps, err := filepath.Abs("../../.deps/remote")
	require.NoError(t, err)
	for program, args := range servers {
		t.Run(filepath.Base(program), func(t *testing.T) {
			path := filepath.Join(deps, program)
			if _, err := os.Stat(path); err != nil || testing.Short() {
				t.Skip("NOT TESTED: make deps-remote fetches it")
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			address := l.Addr().String()
			require.NoError(t, l.Close())
			_, port, err := net.SplitHostPort(address)
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(context.Background())
			cmd := exec.CommandContext(ctx, path, args(address, port, t.TempDir())...)
			log, err := os.Create(filepath.Join(t.TempDir(), "log"))
			require.NoError(t, err)
			cmd.Stdout, cmd.Stderr = log, log
			require.NoError(t, cmd.Start())
			t.Cleanup(func() {
				cancel()
				_ = cmd.Wait() // it was killed
				_ = log.Close()
			})
			admin, err := minio.New(address, &minio.Options{
				Creds: credentials.NewStaticV4("user", "secret-secret", ""), Region: awsFirst})
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				return admin.MakeBucket(ctx, "bucket", minio.MakeBucketOptions{}) == nil
			}, 30*time.Second, 50*time.Millisecond)
			withServer(t, remote.Config{Name: name, URL: "s3://bucket/p",
				Endpoint: "http://" + address,
				Connect:  2 * time.Second})
		})
	}
}

func withServer(t *testing.T, config remote.Config) {
	c := client(t, nil, config)
	found, err := c.Check(t.Context(), name)
	require.NoError(t, err)
	for _, one := range found {
		require.True(t, one.OK, "%+v", one)
	}
	require.Len(t, found, 7)

	e := export(t, randomBytes(1, 20<<20))
	sent, put := e.publish(t, c)
	require.Equal(t, len(e.blobs), sent.Sent)
	require.Equal(t, remote.Created, put)
	began := time.Now()
	sent, put = e.publish(t, c)
	t.Logf("pushed again in %v", time.Since(began))
	require.Equal(t, remote.Sent{Existed: len(e.blobs)}, sent)
	require.Equal(t, remote.Exists, put)
	for _, key := range []remote.Key{remote.BuildKey(buildKey), remote.RequestKey(otherKey)} {
		cards, err := c.Look(t.Context(), name, key, budget)
		require.NoError(t, err)
		require.Equal(t, [][]byte{e.card.Raw}, cards)
	}
	_, err = c.Look(t.Context(), name, remote.BuildKey(otherKey), budget)
	require.ErrorIs(t, err, remote.ErrMissing)
	_, err = c.Look(t.Context(), name, remote.RequestKey(buildKey), budget)
	require.ErrorIs(t, err, remote.ErrMissing)
	got, p, err := e.fetch(t, t.Context(), c)
	require.NoError(t, err)
	e.requireEqual(t, got)
	t.Logf("whole: %+v", p)
	got, p, err = e.fetch(t, t.Context(), c, e.files["m.bin"][1000:])
	require.NoError(t, err)
	e.requireEqual(t, got)
	t.Logf("with a seed: %+v", p)
	require.Less(t, p.Wire, int64(1<<20))

	// A blob that is touched stays as it is.
	t.Setenv("AWS_ACCESS_KEY_ID", "user")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret-secret")
	u, err := url.Parse(config.URL)
	require.NoError(t, err)
	s, err := newS3(config, u)
	require.NoError(t, err)
	ctx := withCall(t.Context(), new(call))
	blob := e.layers[0].Blob
	require.NoError(t, s.touch(ctx, blobName(blob.Digest), blob.Size))
	raw, _, err := small(ctx, s, blobName(blob.Digest), blob.Size)
	require.NoError(t, err)
	require.Equal(t, blob.Digest, portable.DigestOf(raw))

	large := randomBytes(2, 12<<20)
	onePut, partPut = 5<<20, 5<<20
	defer func() { onePut, partPut = 256<<20, 64<<20 }()
	sum := portable.DigestOf(large)
	require.NoError(t, s.put(ctx, blobName(sum), io.NewSectionReader(bytes.NewReader(large), 0,
		int64(len(large))), sum.Hex(), condition{}))
	raw, _, err = small(ctx, s, blobName(sum), int64(len(large)))
	require.NoError(t, err)
	require.Equal(t, sum, portable.DigestOf(raw))

	var all sync.WaitGroup
	states := make([]remote.Lease, 50)
	for i := range states {
		all.Go(func() {
			states[i], _ = c.Lease(t.Context(), name, remote.LeaseRequest{Key: buildKey,
				Holder: strings.Repeat("x", i+1), Estimate: time.Minute, TTL: time.Second})
		})
	}
	all.Wait()
	granted := 0
	for _, l := range states {
		if l.State == remote.Granted {
			granted++
		} else {
			require.Equal(t, remote.Held, l.State)
		}
	}
	require.Equal(t, 1, granted)
	require.Eventually(t, func() bool { // its holder does not renew it
		l, err := c.Lease(t.Context(), name, remote.LeaseRequest{Key: buildKey, Holder: "next",
			Estimate: time.Minute, TTL: time.Second})
		return err == nil && l == remote.Lease{State: remote.Granted, TakenOver: true}
	}, 10*time.Second, 100*time.Millisecond)
}
