package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// realServer is a program that `testdata/fetch-remote` fetches, and its arguments.
type realServer struct {
	program string
	args    func(address, port, dir string) []string
}

// servers are S3 servers.
var servers = map[string]realServer{
	"versitygw": {"versitygw", func(address, _, dir string) []string {
		return []string{"--access", "user", "--secret", "secret-secret", "--port", address,
			"posix", dir}
	}},
	"moto": {"moto/bin/python", func(_, port, _ string) []string {
		return []string{"-m", "moto.server", "-p", port}
	}},
}

// registries are OCI registries; docker-registry has no referrers API.
var registries = map[string]realServer{
	"olareg": {"olareg", func(_, port, dir string) []string {
		return []string{"serve", "--addr", "127.0.0.1", "--port", port, "--dir", dir}
	}},
	"docker-registry": {"docker-registry", func(address, _, dir string) []string {
		config := filepath.Join(dir, "config.yml")
		_ = os.WriteFile(config, fmt.Appendf(nil, "version: 0.1\nstorage: {filesystem: "+
			"{rootdirectory: %s}}\nhttp: {addr: %s}\n", dir, address), 0o600)
		return []string{"serve", config}
	}},
}

// fetched returns the path of what fetch-remote fetched.
func fetched(t *testing.T, program string) string {
	at, err := filepath.Abs("../../.deps/remote/" + program)
	require.NoError(t, err)
	if _, err := os.Stat(at); err != nil || testing.Short() {
		t.Skipf("NOT TESTED: testdata/fetch-remote fetches %s", program)
	}
	return at
}

// start starts the server, and returns its address once it answers.
func (s realServer) start(t *testing.T) string {
	path := fetched(t, s.program)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, path, s.args(address, port, t.TempDir())...)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
		_ = log.Close()
	})
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", address)
		return err == nil && c.Close() == nil
	}, 30*time.Second, 20*time.Millisecond)
	return address
}

func TestRealServers(t *testing.T) {
	for name, s := range servers {
		t.Run(name, func(t *testing.T) {
			address := s.start(t)
			admin, err := minio.New(address, &minio.Options{
				Creds: credentials.NewStaticV4("user", "secret-secret", ""), Region: awsFirst})
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				return admin.MakeBucket(t.Context(), "bucket", minio.MakeBucketOptions{}) == nil
			}, 30*time.Second, 50*time.Millisecond)
			withServer(t, bucketAt(address))
		})
	}
}

func bucketAt(address string) remote.Config {
	return remote.Config{Name: name, URL: "s3://bucket/p", Endpoint: "http://" + address,
		Connect: 2 * time.Second}
}

func repositoryAt(address string) remote.Config {
	return remote.Config{Name: name, URL: "oci://" + address + "/team/builds",
		Endpoint: "http://" + address, Connect: 2 * time.Second}
}

func TestRealRegistries(t *testing.T) {
	for name, s := range registries {
		t.Run(name, func(t *testing.T) { withRegistry(t, name, repositoryAt(s.start(t))) })
	}
}

func withRegistry(t *testing.T, registry string, config remote.Config) {
	c := client(t, nil, config)
	lacks := []string{"create-only"}
	if registry == "docker-registry" {
		lacks = append(lacks, "referrers")
	}
	found, err := c.Check(t.Context(), name)
	require.NoError(t, err)
	require.Len(t, found, 7)
	for _, one := range found {
		require.Equal(t, !slices.Contains(lacks, one.Name), one.OK, "%+v", one)
	}
	e := export(t, randomBytes(1, 20<<20))
	sent, put := e.publish(t, c)
	require.Equal(t, e.uploads("oci"), sent.Sent+sent.Existed)
	require.Equal(t, 1, sent.Existed) // the empty config, which the check has put
	require.Equal(t, remote.Created, put)
	began := time.Now()
	sent, put = e.publish(t, c)
	t.Logf("pushed again in %v", time.Since(began))
	require.Equal(t, remote.Sent{Existed: e.uploads("oci")}, sent)
	require.Equal(t, remote.Exists, put)
	transfer(t, c, e)

	// Another build that answers the same request.
	other := exportOf(t, portable.Hash{2}, randomBytes(2, 1<<20))
	_, err = c.PutBlobs(t.Context(), name, other.blobs, nil)
	require.NoError(t, err)
	_, err = c.PutCard(t.Context(), name, remote.CardKeys{Build: portable.Hash{2},
		Requests: []portable.Hash{otherKey}}, other.card.Raw)
	require.NoError(t, err)
	cards, err := c.Look(t.Context(), name, remote.RequestKey(otherKey), budget)
	require.NoError(t, err)
	require.ElementsMatch(t, [][]byte{e.card.Raw, other.card.Raw}, cards)
	_, err = c.Trust(t.Context(), name)
	require.ErrorIs(t, err, remote.ErrMissing)
}

// transfer looks for a build that was published, and fetches it.
func transfer(t *testing.T, c *remote.Client, e *exported) {
	for _, key := range []remote.Key{remote.BuildKey(buildKey), remote.RequestKey(otherKey)} {
		cards, err := c.Look(t.Context(), name, key, budget)
		require.NoError(t, err)
		require.Equal(t, [][]byte{e.card.Raw}, cards)
	}
	_, err := c.Look(t.Context(), name, remote.BuildKey(otherKey), budget)
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
}

func withServer(t *testing.T, config remote.Config) {
	c := client(t, nil, config)
	found, err := c.Check(t.Context(), name)
	require.NoError(t, err)
	for _, one := range found {
		require.True(t, one.OK, "%+v", one)
	}
	require.Len(t, found, 8)

	e := export(t, randomBytes(1, 20<<20))
	sent, put := e.publish(t, c)
	require.Equal(t, len(e.blobs), sent.Sent)
	require.Equal(t, remote.Created, put)
	began := time.Now()
	sent, put = e.publish(t, c)
	t.Logf("pushed again in %v", time.Since(began))
	require.Equal(t, remote.Sent{Existed: len(e.blobs)}, sent)
	require.Equal(t, remote.Exists, put)
	transfer(t, c, e)

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

// The policies of doc/s3 are enough for machines that read and for publishers, and for no more.
func TestPoliciesInTheDocumentsAreEnough(t *testing.T) {
	gateway := servers["versitygw"]
	gateway.args = func(address, _, dir string) []string {
		return []string{"--access", "root", "--secret", "secret-secret", "--port", address,
			"--iam-dir", t.TempDir(), "posix", dir}
	}
	address := gateway.start(t)
	admin, err := minio.New(address, &minio.Options{
		Creds: credentials.NewStaticV4("root", "secret-secret", ""), Region: awsFirst})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return admin.MakeBucket(t.Context(), "bucket", minio.MakeBucketOptions{}) == nil
	}, 30*time.Second, 50*time.Millisecond)
	var both []any
	for _, user := range []string{"reader", "publisher"} {
		out, err := exec.Command(fetched(t, "versitygw"), "admin", "--access", "root", "--secret",
			"secret-secret", "--endpoint-url", "http://"+address, "create-user", "--access", user,
			"--secret", "secret-secret", "--role", "user").CombinedOutput()
		require.NoError(t, err, string(out))
		text, err := os.ReadFile("../../doc/s3/" + user + ".json")
		require.NoError(t, err)
		var policy struct{ Statement []map[string]any }
		require.NoError(t, json.Unmarshal([]byte(strings.NewReplacer("BUCKET", "bucket", "PREFIX",
			"p").Replace(string(text))), &policy))
		for _, s := range policy.Statement {
			s["Principal"] = map[string]any{"AWS": []string{user}} // it is the bucket's here
			delete(s, "Sid")
			delete(s, "Condition") // versitygw has none
			both = append(both, s)
		}
	}
	text, err := json.Marshal(map[string]any{"Version": "2012-10-17", "Statement": both})
	require.NoError(t, err)
	require.NoError(t, admin.SetBucketPolicy(t.Context(), "bucket", string(text)))
	as := func(user string) *remote.Client {
		return client(t, []string{"AWS_ACCESS_KEY_ID=" + user}, bucketAt(address))
	}
	publisher, reader := as("publisher"), as("reader")
	found, err := publisher.Check(t.Context(), name)
	require.NoError(t, err)
	for _, one := range found {
		require.True(t, one.OK, "%+v", one)
	}
	e := export(t, randomBytes(1, 1<<20))
	_, put := e.publish(t, publisher)
	require.Equal(t, remote.Created, put)
	_, err = publisher.Renew(t.Context(), name, remote.CardKeys{Build: buildKey}, e.card.Raw)
	require.NoError(t, err)
	for _, release := range []bool{false, true} {
		l, err := publisher.Lease(t.Context(), name, remote.LeaseRequest{Key: buildKey,
			Holder: "x", Estimate: time.Minute, TTL: time.Minute, Release: release})
		require.NoError(t, err)
		require.Equal(t, remote.Granted, l.State)
	}
	transfer(t, reader, e)

	other := export(t, randomBytes(2, 1<<20))
	_, err = reader.PutBlobs(t.Context(), name, other.blobs, nil)
	require.ErrorIs(t, err, remote.ErrRefused)
	_, err = publisher.PutTrust(t.Context(), name, []byte("{}"), portable.Digest{})
	require.ErrorIs(t, err, remote.ErrRefused)
	_, err = publisher.Collect(t.Context(), name, false, nil)
	require.NoError(t, err) // there is nothing to remove

	var rules struct {
		Rules []struct {
			Filter                         struct{ Prefix string }
			Expiration                     struct{ Days int }
			NoncurrentVersionExpiration    struct{ NoncurrentDays int }
			AbortIncompleteMultipartUpload struct{ DaysAfterInitiation int }
		}
	}
	text, err = os.ReadFile("../../doc/s3/lifecycle.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &rules))
	days := make(map[string]int)
	for _, r := range rules.Rules {
		if r.Filter.Prefix == "PREFIX/v1/" { // what a bucket with versions would keep for ever
			require.Positive(t, r.NoncurrentVersionExpiration.NoncurrentDays)
			require.Positive(t, r.AbortIncompleteMultipartUpload.DaysAfterInitiation)
			continue
		}
		days[strings.TrimPrefix(r.Filter.Prefix, "PREFIX/")] = r.Expiration.Days
	}
	require.Equal(t, map[string]int{"v1/blobs/": 120, "v1/builds/": 75, "v1/requests/": 75,
		"v1/leases/": 1, checkName: 1}, days) // doc/format.md has them as well
}
