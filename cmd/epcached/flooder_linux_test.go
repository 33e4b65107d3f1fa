package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/epcached/epcached/compilers/compilertest"
	"github.com/epcached/epcached/unixsock/wire"
)

// A flooder is an application of another user that sends the daemon as much as it can of all that
// it may send, and more. It is this test binary in a process of its own, with its order in the
// environment: it says "flooding" when each of its attacks has begun, and "enough" when the
// requests of the order are sent, goes on until its input ends, and says then what it has done.
const flooderEnvironment = "EPCACHED_TEST_FLOOD"

type floodOrder struct {
	Socket      string
	Dir         string // for its models; of its user's
	Stored      string // a model that the daemon has a build of
	UID         int
	Connections int
	Requests    int64
	Seed        uint64
	Attacks     []string // of the table attacks, or "all"
}

// flooded is what a flooder has done.
type flooded struct {
	Requests, Connections, Refused int64
	Seconds, ProcessorSeconds      float64
	Attacks                        map[string]int64 // what each has sent: frames or connections
}

type flooding struct {
	floodOrder
	stored *os.File

	requests, connections, refused, models atomic.Int64

	sent map[string]*atomic.Int64
}

// attack is what one connection does until it fails or the context ends. Hello is exchanged.
type attack func(ctx context.Context, f *flooding, c *hostile, random *rand.Rand) error

var attacks = map[string]attack{
	"idle":         idleAttack,
	"half frames":  halfFrameAttack,
	"nonsense":     nonsenseAttack,
	"unread":       unreadAttack,
	"descriptors":  descriptorAttack,
	"every kind":   everyKindAttack,
	"hits":         hitAttack,
	"misses":       missAttack,
	"cancelled":    cancelAttack,
	"come and go":  func(context.Context, *flooding, *hostile, *rand.Rand) error { return nil },
	"large":        largeAttack,
	"many tensors": manyTensorsAttack,

	// Not the daemon's matter: what the processors' other work alone costs the neighbour.
	"work": workAttack,
}

func flood(text string) int {
	f := &flooding{sent: make(map[string]*atomic.Int64)}
	err := json.Unmarshal([]byte(text), &f.floodOrder)
	if err == nil {
		f.stored, err = os.Open(f.Stored)
	}
	if err == nil {
		err = errors.Join(syscall.Setgroups(nil), syscall.Setresgid(f.UID, f.UID, f.UID),
			syscall.Setresuid(f.UID, f.UID, f.UID))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	ctx, over := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the test has seen enough, or is gone
		over()
	}()
	began := time.Now()
	f.run(ctx)
	done := flooded{Requests: f.requests.Load(), Connections: f.connections.Load(),
		Refused: f.refused.Load(), Seconds: time.Since(began).Seconds(),
		Attacks: make(map[string]int64)}
	for name, sent := range f.sent {
		done.Attacks[name] = sent.Load()
	}
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err == nil {
		done.ProcessorSeconds = time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
	}
	line, err := json.Marshal(done)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	fmt.Printf("got %s\n", line)
	return 0
}

func (f *flooding) run(ctx context.Context) {
	names := f.Attacks
	if slices.Contains(names, "all") {
		names = slices.Sorted(maps.Keys(attacks))
		names = slices.DeleteFunc(names, func(name string) bool { return name == "work" })
	}
	for _, name := range names {
		f.sent[name] = new(atomic.Int64)
	}
	var all sync.WaitGroup
	for i := range f.Connections {
		all.Go(func() {
			f.attack(ctx, names[i%len(names)], rand.New(rand.NewPCG(f.Seed, uint64(i))))
		})
	}
	begun := func() bool { // each attack
		return !slices.ContainsFunc(names,
			func(name string) bool { return f.sent[name].Load() == 0 })
	}
	f.say(ctx, "flooding", begun)
	f.say(ctx, "enough", func() bool { return f.requests.Load() >= f.Requests })
	all.Wait()
}

func (f *flooding) say(ctx context.Context, line string, when func() bool) {
	for !when() {
		if ctx.Err() != nil {
			return
		}
		idleFor(ctx, 5*time.Millisecond)
	}
	fmt.Println(line)
}

func idleFor(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// attack connects again and again.
func (f *flooding) attack(ctx context.Context, name string, random *rand.Rand) {
	for ctx.Err() == nil {
		c, err := dialHostile(ctx, f.Socket, name != "unread")
		if err == nil {
			f.connections.Add(1)
			c.sent = f.sent[name]
			c.sent.Add(1)
			_ = attacks[name](ctx, f, c, random) // the daemon, or this process, ends the connection
			c.conn.Close()
			continue
		}
		f.refused.Add(1)
		idleFor(ctx, time.Duration(random.IntN(50))*time.Millisecond)
	}
}

// hostile is a connection that keeps to no rule.
type hostile struct {
	conn   *net.UnixConn
	number uint64
	sent   *atomic.Int64
}

// dialHostile connects, and exchanges the first frames. With reads, all that the daemon sends from
// then on is read and dropped.
func dialHostile(ctx context.Context, socket string, reads bool) (*hostile, error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	c := &hostile{conn: conn}
	hello := &wire.Envelope{Body: &wire.Envelope_Hello{Hello: &wire.Hello{Version: 1}}}
	if err = c.write(hello); err == nil {
		err = c.welcome()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	if reads {
		go c.drain()
	}
	return c, nil
}

func (c *hostile) welcome() error {
	var length [4]byte
	if _, err := io.ReadFull(c.conn, length[:]); err != nil {
		return err
	}
	frame := make([]byte, binary.LittleEndian.Uint32(length[:]))
	if _, err := io.ReadFull(c.conn, frame); err != nil {
		return err
	}
	var reply wire.Envelope
	if err := proto.Unmarshal(frame, &reply); err != nil {
		return err
	}
	if reply.GetHelloReply() == nil {
		return errors.New(reply.GetError().GetText())
	}
	return nil
}

func (c *hostile) drain() {
	data, control := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(253*4))
	for {
		_, n, _, _, err := c.conn.ReadMsgUnix(data, control)
		if err != nil {
			return
		}
		messages, err := unix.ParseSocketControlMessage(control[:n])
		if err != nil {
			continue
		}
		for i := range messages {
			fds, err := unix.ParseUnixRights(&messages[i])
			if err != nil {
				continue
			}
			for _, fd := range fds {
				unix.Close(fd)
			}
		}
	}
}

// send sends a request, and returns its number.
func (f *flooding) send(c *hostile, envelope *wire.Envelope, files ...*os.File) (uint64, error) {
	c.number++
	envelope.Request = c.number
	f.requests.Add(1)
	c.sent.Add(1)
	return c.number, c.write(envelope, files...)
}

func (c *hostile) write(envelope *wire.Envelope, files ...*os.File) error {
	envelope.Descriptors = uint32(len(files))
	payload, err := proto.Marshal(envelope)
	if err != nil {
		return err
	}
	length := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	return c.writeBytes(append(length, payload...), files...)
}

func (c *hostile) writeBytes(data []byte, files ...*os.File) error {
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	n, _, err := c.conn.WriteMsgUnix(data, rights, nil)
	if err == nil && n < len(data) {
		_, err = c.conn.Write(data[n:])
	}
	return err
}

func idleAttack(ctx context.Context, _ *flooding, c *hostile, _ *rand.Rand) error {
	_, err := io.Copy(io.Discard, c.conn) // until the daemon ends it
	<-ctx.Done()
	return err
}

func workAttack(ctx context.Context, _ *flooding, _ *hostile, _ *rand.Rand) error {
	for sum := 0; ctx.Err() == nil; sum++ {
	}
	return nil
}

// halfFrameAttack announces a large frame and sends a part of it.
func halfFrameAttack(ctx context.Context, _ *flooding, c *hostile, random *rand.Rand) error {
	part := make([]byte, 4+random.IntN(900<<10))
	binary.LittleEndian.PutUint32(part, 1<<20)
	if err := c.writeBytes(part); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// nonsenseAttack breaks a rule, and connects again.
func nonsenseAttack(_ context.Context, _ *flooding, c *hostile, random *rand.Rand) error {
	frame := make([]byte, random.IntN(64))
	for i := range frame {
		frame[i] = byte(random.Uint32())
	}
	length := uint32(len(frame))
	if random.IntN(4) == 0 {
		length = random.Uint32()
	}
	return c.writeBytes(append(binary.LittleEndian.AppendUint32(nil, length), frame...))
}

// acquireOf is a request for the model that is the frame's only descriptor.
func acquireOf(name string, miss wire.OnMiss) *wire.Envelope {
	request := forModel(name)
	request.OnMiss, request.HoldsView = miss, true
	return &wire.Envelope{Body: &wire.Envelope_Acquire{Acquire: request}}
}

func hitAttack(ctx context.Context, f *flooding, c *hostile, _ *rand.Rand) error {
	for ctx.Err() == nil {
		if _, err := f.send(c, acquireOf(f.Stored, wire.OnMiss_FAIL), f.stored); err != nil {
			return err
		}
	}
	return nil
}

// unreadAttack leaves unread what the daemon answers with descriptors, and large answers.
func unreadAttack(ctx context.Context, f *flooding, c *hostile, random *rand.Rand) error {
	for ctx.Err() == nil {
		what := acquireOf(f.Stored, wire.OnMiss_FAIL)
		files := []*os.File{f.stored}
		if random.IntN(2) == 0 {
			what = &wire.Envelope{Body: &wire.Envelope_Events{Events: &wire.Events{}}}
			files = nil
		}
		if _, err := f.send(c, what, files...); err != nil {
			return err
		}
	}
	return nil
}

// descriptorAttack sends descriptors for requests that never follow.
func descriptorAttack(ctx context.Context, f *flooding, c *hostile, random *rand.Rand) error {
	for ctx.Err() == nil {
		files := slices.Repeat([]*os.File{f.stored}, 1+random.IntN(64))
		attach := &wire.Envelope{Request: uint64(1 + random.IntN(64)),
			Body: &wire.Envelope_Attach{Attach: &wire.Attach{}}}
		c.sent.Add(1)
		if err := c.write(attach, files...); err != nil {
			return err
		}
		if random.IntN(4) == 0 {
			c.number = uint64(random.IntN(64)) // the next is of one of these
			if _, err := f.send(c, acquireOf(f.Stored, wire.OnMiss_FAIL), f.stored); err != nil {
				return err
			}
		}
	}
	return nil
}

// missAttack waits for compiles of models that are not stored.
func missAttack(ctx context.Context, f *flooding, c *hostile, _ *rand.Rand) error {
	return f.newModels(ctx, c, func(file *os.File) error {
		_, err := f.send(c, acquireOf(file.Name(), wire.OnMiss_WAIT), file)
		idleFor(ctx, 20*time.Millisecond)
		return err
	})
}

// cancelAttack gives up what it has just asked for.
func cancelAttack(ctx context.Context, f *flooding, c *hostile, _ *rand.Rand) error {
	return f.newModels(ctx, c, func(file *os.File) error {
		number, err := f.send(c, acquireOf(file.Name(), wire.OnMiss_WAIT), file)
		if err != nil {
			return err
		}
		cancel := &wire.Envelope_Cancel{Cancel: &wire.Cancel{}}
		return c.write(&wire.Envelope{Request: number, Body: cancel})
	})
}

func (f *flooding) newModels(ctx context.Context, c *hostile, use func(*os.File) error) error {
	for ctx.Err() == nil {
		file, err := f.write(compilertest.Dense(f.Seed+uint64(f.models.Add(1)), 16, 1), 0)
		if err == nil {
			err = errors.Join(use(file), file.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// write makes a file of these bytes, and of zeros up to the size, that has no name any more.
func (f *flooding) write(data []byte, size int64) (*os.File, error) {
	file, err := os.CreateTemp(f.Dir, "*.onnx")
	if err != nil {
		return nil, err
	}
	_, err = file.Write(data)
	if err == nil && size > int64(len(data)) {
		err = file.Truncate(size)
	}
	err = errors.Join(err, os.Remove(file.Name()))
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// largeAttack sends models of a gigabyte, most of which is a hole, and changes them each time.
func largeAttack(ctx context.Context, f *flooding, c *hostile, random *rand.Rand) error {
	const raw = 1 << 30
	tensor := protowire.AppendVarint([]byte{0x08}, raw/4)                  // dims
	tensor = protowire.AppendVarint(append(tensor, 0x10, 0x01, 0x4a), raw) // of float, raw_data
	tensor = append(protowire.AppendVarint([]byte{0x2a}, uint64(len(tensor)+raw)), tensor...)
	graph := append(protowire.AppendVarint([]byte{0x08, 0x08, 0x3a}, uint64(len(tensor)+raw)),
		tensor...)
	file, err := f.write(graph, int64(len(graph)+raw))
	if err != nil {
		return err
	}
	defer file.Close()
	for ctx.Err() == nil {
		at := int64(len(graph)) + random.Int64N(raw)
		if _, err := file.WriteAt([]byte{byte(random.Uint32())}, at); err != nil {
			return err
		}
		if _, err := f.send(c, acquireOf("large.onnx", wire.OnMiss_FAIL), file); err != nil {
			return err
		}
		idleFor(ctx, time.Second)
	}
	return nil
}

// manyTensorsAttack sends small models that take much memory to parse: of empty initializers.
func manyTensorsAttack(ctx context.Context, f *flooding, c *hostile, random *rand.Rand) error {
	tensors := slices.Repeat([]byte{0x2a, 0}, 400_000)
	for ctx.Err() == nil {
		name := fmt.Sprintf("\x12\x10%016x", random.Uint64()) // of the graph: each is another one
		model := protowire.AppendVarint([]byte{0x08, 0x08, 0x3a}, uint64(len(tensors)+len(name)))
		file, err := f.write(slices.Concat(model, []byte(name), tensors), 0)
		if err != nil {
			return err
		}
		_, err = f.send(c, acquireOf("many.onnx", wire.OnMiss_FAIL), file)
		idleFor(ctx, 100*time.Millisecond)
		if err := errors.Join(err, file.Close()); err != nil {
			return err
		}
	}
	return nil
}

// everyKindAttack sends each request that the protocol has, with arbitrary contents.
func everyKindAttack(ctx context.Context, f *flooding, c *hostile, random *rand.Rand) error {
	bodies := (&wire.Envelope{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for ctx.Err() == nil {
		body := bodies.Get(random.IntN(bodies.Len()))
		envelope := &wire.Envelope{}
		arbitrary(envelope.ProtoReflect().Mutable(body).Message(), random, 3)
		if random.IntN(2) == 0 {
			envelope.DeadlineMs = int64(random.IntN(1000))
		}
		if random.IntN(8) == 0 { // what is no request, and descriptors, end the connection
			_, err := f.send(c, envelope, f.stored)
			if err != nil {
				return err
			}
			continue
		}
		switch name := string(body.Name()); {
		case strings.HasSuffix(name, "_reply"), name == "hello", name == "attach", name == "cancel":
			continue
		}
		if _, err := f.send(c, envelope); err != nil {
			return err
		}
	}
	return nil
}

// arbitrary fills in about half of the fields.
func arbitrary(m protoreflect.Message, random *rand.Rand, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		switch {
		case random.IntN(2) == 0 || field.IsMap():
		case field.Message() != nil && depth == 0:
		case field.IsList() && field.Message() != nil:
			arbitrary(m.Mutable(field).List().AppendMutable().Message(), random, depth-1)
		case field.IsList():
			m.Mutable(field).List().Append(arbitraryValue(field, random))
		case field.Message() != nil:
			arbitrary(m.Mutable(field).Message(), random, depth-1)
		default:
			m.Set(field, arbitraryValue(field, random))
		}
	}
}

func arbitraryValue(field protoreflect.FieldDescriptor, random *rand.Rand) protoreflect.Value {
	small := random.IntN(4)
	switch field.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(small > 1)
	case protoreflect.StringKind:
		return protoreflect.ValueOfString([]string{"", "a", "OpenVINOExecutionProvider",
			strings.Repeat("0123456789abcdef", 4)}[small])
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(make([]byte, small))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(small))
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		return protoreflect.ValueOfInt32(int32(small))
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return protoreflect.ValueOfUint32(uint32(small))
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return protoreflect.ValueOfInt64(random.Int64() >> random.IntN(64))
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return protoreflect.ValueOfUint64(random.Uint64() >> random.IntN(64))
	case protoreflect.FloatKind:
		return protoreflect.ValueOfFloat32(random.Float32())
	}
	return protoreflect.ValueOfFloat64(random.Float64())
}
