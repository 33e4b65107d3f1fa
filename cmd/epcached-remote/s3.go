package main

import (
	"context"
	"errors"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/epcached/epcached/remote"
)

// s3 is a bucket of any S3-compatible store. Conditional puts are one PUT, because minio-go drops
// If-None-Match from multipart uploads. Trailing checksums are off, because several servers refuse
// them.
type s3 struct {
	*meter
	core   minio.Core
	bucket string
	prefix string
}

// Larger blobs are uploaded in parts of that size.
var onePut, partPut int64 = 256 << 20, 64 << 20

const (
	maxCopy  = 5 << 30 // largest server-side copy
	awsHost  = "s3.amazonaws.com"
	awsFirst = "us-east-1" // the region for stores without regions
)

func newS3(c remote.Config, u *url.URL) (*s3, error) {
	s := &s3{meter: newMeter(c), bucket: u.Host, prefix: strings.Trim(u.Path, "/")}
	host, secure, region := awsHost, true, c.Region
	if c.Endpoint != "" {
		e, err := url.Parse(c.Endpoint)
		if err != nil {
			return nil, err
		}
		host, secure = e.Host, e.Scheme == "https"
		if region == "" {
			region = awsFirst
		}
	}
	client, err := minio.New(host,
		&minio.Options{Creds: credentialsOf(c), Secure: secure, Region: region,
			Transport: s.meter, MaxRetries: 1})
	if err != nil {
		return nil, fail("unsupported", "%v", err)
	}
	client.SetAppInfo("epcached", version)
	s.core = minio.Core{Client: client}
	return s, nil
}

// credentialsOf finds the credentials of a remote. Without any, access is anonymous.
func credentialsOf(c remote.Config) *credentials.Credentials {
	var from []credentials.Provider
	if dir := os.Getenv("CREDENTIALS_DIRECTORY"); dir != "" {
		from = append(from, &credentials.FileAWSCredentials{Filename: filepath.Join(dir, c.Name)})
	}
	from = append(from, &credentials.EnvAWS{}, &credentials.FileAWSCredentials{})
	for _, p := range from {
		if v, err := p.RetrieveWithCredContext(nil); err == nil && v.AccessKeyID != "" {
			return credentials.New(p)
		}
	}
	if hasIdentity() {
		return credentials.NewIAM("")
	}
	return credentials.NewStaticV4("", "", "")
}

// hasIdentity reports whether the machine or the container may have an identity of AWS. Elsewhere a
// request for one would wait for an address without a host.
func hasIdentity() bool {
	for _, name := range []string{"AWS_WEB_IDENTITY_TOKEN_FILE",
		"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
		"AWS_CONTAINER_CREDENTIALS_FULL_URI"} {
		if os.Getenv(name) != "" {
			return true
		}
	}
	vendor, err := os.ReadFile("/sys/class/dmi/id/sys_vendor")
	return err == nil && strings.Contains(string(vendor), "Amazon")
}

func (s *s3) can() remote.Can { return all }

func (s *s3) key(name string) string { return join(s.prefix, name) }

// failed returns the error of the server's answer.
func failed(err error) error {
	e, is := errors.AsType[minio.ErrorResponse](err)
	switch {
	case err == nil:
		return nil
	case !is || e.StatusCode == 0:
		return err
	case e.Code == "NoSuchBucket":
		return fail("refused", "there is no such bucket")
	}
	return statusError(e.StatusCode, e.Code)
}

func objectIn(info minio.ObjectInfo) *object {
	return &object{size: info.Size, etag: info.ETag, modified: info.LastModified}
}

func (s *s3) get(ctx context.Context, name string, from, length int64) (*object, error) {
	var opts minio.GetObjectOptions
	if length >= 0 {
		if err := opts.SetRange(from, from+length-1); err != nil {
			return nil, err
		}
	}
	body, info, header, err := s.core.GetObject(ctx, s.bucket, s.key(name), opts)
	if err != nil {
		return nil, failed(err)
	}
	o := objectIn(info)
	o.body = body
	if span := header.Get("Content-Range"); span != "" {
		if o.from, o.size, err = contentRange(span); err != nil {
			return nil, errors.Join(err, body.Close())
		}
	}
	return o, nil
}

func (s *s3) stat(ctx context.Context, name string) (*object, error) {
	info, err := s.core.StatObject(ctx, s.bucket, s.key(name), minio.StatObjectOptions{})
	if err != nil {
		return nil, failed(err)
	}
	return objectIn(info), nil
}

func (s *s3) put(ctx context.Context, name string, body *io.SectionReader, sha256 string,
	when condition) error {
	opts := minio.PutObjectOptions{ContentType: "application/octet-stream",
		PartSize: uint64(partPut), NumThreads: 1}
	if body.Size() > onePut && when == (condition{}) {
		_, err := s.core.Client.PutObject(ctx, s.bucket, s.key(name), body, body.Size(), opts)
		return failed(err)
	}
	if when.create {
		opts.SetMatchETagExcept("*")
	} else if when.match != "" {
		opts.SetMatchETag(when.match)
	}
	if _, err := body.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err := s.core.PutObject(ctx, s.bucket, s.key(name), body, body.Size(), "", sha256, opts)
	return failed(err)
}

// touch copies an object onto itself at the server. An object that is too large for one copy is
// composed of its own parts.
func (s *s3) touch(ctx context.Context, name string, size int64) error {
	from := minio.CopySrcOptions{Bucket: s.bucket, Object: s.key(name)}
	to := minio.CopyDestOptions{Bucket: s.bucket, Object: s.key(name), ReplaceMetadata: true}
	var err error
	if size > maxCopy {
		_, err = s.core.ComposeObject(ctx, to, from)
	} else {
		_, err = s.core.Client.CopyObject(ctx, to, from)
	}
	return failed(err)
}

func (s *s3) list(ctx context.Context, prefix string, most int) (names []string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	whole := s.key(prefix)
	opts := minio.ListObjectsOptions{Prefix: whole, Recursive: true, MaxKeys: most}
	for o := range s.core.Client.ListObjects(ctx, s.bucket, opts) {
		if o.Err != nil {
			return nil, failed(o.Err)
		}
		if name, is := strings.CutPrefix(o.Key, whole); is && name != "" {
			names = append(names, name)
		}
		if len(names) == most {
			break
		}
	}
	return names, ctx.Err()
}

func (s *s3) walk(ctx context.Context, prefix string,
	fn func(name string, o *object) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opts := minio.ListObjectsOptions{Prefix: s.key(prefix), Recursive: true}
	for o := range s.core.Client.ListObjects(ctx, s.bucket, opts) {
		if o.Err != nil {
			return failed(o.Err)
		}
		name := strings.TrimPrefix(strings.TrimPrefix(o.Key, s.prefix), "/")
		if err := fn(name, objectIn(o)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// versioned reports whether the bucket keeps objects that were replaced or removed. It fails where
// the credentials may not ask for that.
func (s *s3) versioned(ctx context.Context) (bool, error) {
	v, err := s.core.Client.GetBucketVersioning(ctx, s.bucket)
	return v.Enabled(), failed(err)
}

func (s *s3) remove(ctx context.Context, name string) error {
	return failed(s.core.RemoveObject(ctx, s.bucket, s.key(name), minio.RemoveObjectOptions{}))
}
