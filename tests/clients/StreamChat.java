import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;

/**
 * Java's own client against a live door: {@code java tests/clients/StreamChat.java http://127.0.0.1:8000 demo}.
 *
 * <p>java.net.http.HttpClient speaks HTTP/2 unless told otherwise, so over plain HTTP its first request to a server asks
 * for an upgrade to h2c, body and all. The server declines by answering in HTTP/1.1, and the body must not be lost.
 * Prints each check; ends with 1 if one does not hold.
 */
public final class StreamChat {
    private static final Pattern CONTENT = Pattern.compile("\"content\":\"((?:[^\"\\\\]|\\\\.)*)\"");
    private static int failures = 0;

    private final HttpClient client = HttpClient.newHttpClient();
    private final URI chat;
    private final String model;

    private StreamChat(String url, String model) {
        this.chat = URI.create(url + "/v1/chat/completions");
        this.model = model;
    }

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        String model = arguments.length > 1 ? arguments[1] : "demo";
        new StreamChat(url, model).whole();
        new StreamChat(url, model).streamed();
        new StreamChat(url, model).large();
        new StreamChat(url, model).many();
        new StreamChat(url, model).closedEarly();
        System.exit(failures == 0 ? 0 : 1);
    }

    private void whole() throws IOException, InterruptedException {
        HttpResponse<String> answer = client.send(ask(body("Hello", 8, false)), HttpResponse.BodyHandlers.ofString());
        check("the first POST of a client, which asks for h2c", answer.statusCode() == 200, answer.body());
        check("is answered in HTTP/1.1", answer.version() == HttpClient.Version.HTTP_1_1, answer.version().toString());
        HttpResponse<String> next = client.send(ask(body("Hello", 8, false)), HttpResponse.BodyHandlers.ofString());
        check("and so is the next one", next.statusCode() == 200, next.body());
        String wrong = "{\"model\": \"" + model + "\", \"messages\": []}";
        HttpResponse<String> refused = client.send(ask(wrong), HttpResponse.BodyHandlers.ofString());
        check("a bad one is a 400 that names the field",
            refused.statusCode() == 400 && refused.body().contains("messages"), refused.body());
    }

    private void streamed() throws IOException, InterruptedException {
        HttpResponse<Stream<String>> answer =
            client.send(ask(body("Hello", 32, true)), HttpResponse.BodyHandlers.ofLines());
        List<String> events = events(answer);
        check("a stream has its type", answer.headers().firstValue("content-type").orElse("")
            .startsWith("text/event-stream"), answer.headers().toString());
        check("and events, the last of them [DONE]",
            events.size() > 1 && events.get(events.size() - 1).equals("[DONE]"), events.toString());
        HttpResponse<String> whole =
            client.send(ask(body("Hello", 32, false)), HttpResponse.BodyHandlers.ofString());
        check("and the text of the whole answer", text(events).equals(text(List.of(whole.body()))), text(events));
    }

    /** A body of more than one frame and more than the server reads in its own loop. */
    private void large() throws IOException, InterruptedException {
        String prompt = "word ".repeat(40_000);
        HttpResponse<String> answer = client.send(ask(body(prompt, 8, true)), HttpResponse.BodyHandlers.ofString());
        check("a body of 200 kB arrives: the prompt is too long, and that is what is said",
            answer.statusCode() == 400 && answer.body().contains("tokens"), answer.statusCode() + answer.body());
    }

    private void many() {
        List<CompletableFuture<HttpResponse<Stream<String>>>> answers = new ArrayList<>();
        for (int i = 0; i < 8; i++) {
            answers.add(client.sendAsync(ask(body("Hello", 16, true)), HttpResponse.BodyHandlers.ofLines()));
        }
        List<String> texts = answers.stream().map(answer -> text(events(answer.join()))).distinct().toList();
        check("eight streams at once say the same", texts.size() == 1 && !texts.get(0).isEmpty(), texts.toString());
    }

    private void closedEarly() throws IOException, InterruptedException {
        HttpResponse<Stream<String>> answer =
            client.send(ask(body("Hello", 64, true)), HttpResponse.BodyHandlers.ofLines());
        try (Stream<String> lines = answer.body()) {
            check("a stream may be closed after its first event",
                lines.filter(line -> line.startsWith("data: ")).findFirst().isPresent(), "no event");
        }
        HttpResponse<String> next = client.send(ask(body("Hello", 8, false)), HttpResponse.BodyHandlers.ofString());
        check("and the client goes on", next.statusCode() == 200, next.body());
    }

    private HttpRequest ask(String body) {
        return HttpRequest.newBuilder(chat)
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    private String body(String prompt, int tokens, boolean stream) {
        return "{\"model\": \"" + model + "\", \"messages\": [{\"role\": \"user\", \"content\": \"" + prompt + "\"}], "
            + "\"max_tokens\": " + tokens + ", \"ignore_eos\": true, \"temperature\": 0, \"stream\": " + stream + "}";
    }

    private static List<String> events(HttpResponse<Stream<String>> answer) {
        return answer.body().filter(line -> line.startsWith("data: ")).map(line -> line.substring(6)).toList();
    }

    private static String text(List<String> bodies) {
        StringBuilder all = new StringBuilder();
        for (String body : bodies) {
            Matcher found = CONTENT.matcher(body);
            while (found.find()) {
                all.append(found.group(1));
            }
        }
        return all.toString();
    }

    private static void check(String what, boolean holds, String seen) {
        System.out.println((holds ? "ok    " : "WRONG ") + what + (holds ? "" : ": " + seen));
        failures += holds ? 0 : 1;
    }
}
